"""What the property tests draw from: layouts, meshes, specs and shapes, small enough to check by brute force.

Everything is drawn together with a second, independent account of itself, in which no code of
`axes` has a part: a mesh comes with the coordinate of each position on each name, computed by
numpy from the text; a sharding comes with its dims and axes as data. A test compares the two.

>>> case = meshes().example()                                      # doctest: +SKIP
>>> case.declaration, case.equations, case.coordinates["dp"]       # doctest: +SKIP
('dp=2 tp=3', ('rows = tp dp',), array([0, 0, 0, 1, 1, 1]))
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from axes import AxesError, Layout, Mesh, SizeError

CASES = int(os.environ.get("AXES_CASES", "1"))
"""`make test-full` looks ten times as far as every run can."""


def examples(number: int) -> settings:
    """So many examples, no clock, no database of failures; the same in every run but those that are told a seed."""
    slow, same = [HealthCheck.too_slow, HealthCheck.filter_too_much], "AXES_SEED" not in os.environ
    how = {"derandomize": same, "deadline": None, "database": None, "suppress_health_check": slow}
    return settings(max_examples=number * CASES, **how)


settings.register_profile("axes", examples(80))
settings.load_profile("axes")

Modes = Sequence[tuple[int, int]]
FACTORS = (1, 2, 2, 3, 4, 5, 6)


def refusal(error: type[AxesError], make: Callable[[], object]) -> str | None:
    """The message of the `error` that `make` raises, None where it raises nothing."""
    try:
        make()
    except error as found:
        return str(found)
    return None


# ---------------------------------------------------------------------------- layouts


@st.composite
def digit_systems(draw: st.DrawFn, most: int = 5, largest: int = 240) -> list[tuple[int, int]]:
    """The digits `(size, stride)` of a random universe, slowest first."""
    sizes: list[int] = []
    for size in draw(st.lists(st.sampled_from(FACTORS), min_size=1, max_size=most)):
        if math.prod(sizes) * size <= largest:
            sizes.append(size)
    return row_major(sizes)


def row_major(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Each size with the product of those after it."""
    return [(size, math.prod(sizes[i + 1 :])) for i, size in enumerate(sizes)]


def span(system: Sequence[tuple[int, int]]) -> int:
    """The number of positions of a universe with these digits."""
    return math.prod(size for size, _ in system)


@st.composite
def parts_of(draw: st.DrawFn, system: Modes, count: int = 3) -> list[Layout]:
    """Layouts that share none of the digits."""
    order = draw(st.permutations(system))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), min_size=count, max_size=count)))
    return [Layout.of(order[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]


def factorizations(number: int, most: int = 4) -> st.SearchStrategy[list[int]]:
    """Sizes that multiply to `number`, slowest first, ones among them."""

    @st.composite
    def drawn(draw: st.DrawFn) -> list[int]:
        left, found = number, []
        for _ in range(draw(st.integers(0, most - 1))):
            size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
            found.append(size)
            left //= size
        return draw(st.permutations([*found, left]))

    return drawn()


# ---------------------------------------------------------------------------- meshes


@dataclass(frozen=True)
class MeshCase:
    """A mesh and, by name, the coordinate of each position and the axes that the name is about."""

    mesh: Mesh
    declaration: str
    equations: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: dict[str, int]
    coordinates: dict[str, np.ndarray] = field(repr=False)
    disjoint: tuple[tuple[str, ...], ...] = field(repr=False)
    """Sets of names that share no digit: what a sub-mesh or a sharding may combine."""


AXIS_NAMES = ("dp", "cp", "tp", "pp")


def rank_maps(size: int) -> st.SearchStrategy[Sequence[int] | None]:
    """What to pass as `ranks`: nothing, a block, evenly spaced, a permutation or a subset."""
    first, most = st.integers(0, 5000), st.sampled_from([size, 4 * size])
    ranges = st.builds(lambda start, step: range(start, start + step * size, step), first, st.sampled_from([1, 3]))
    return st.none() | ranges | most.flatmap(lambda n: st.permutations(range(n))).map(lambda found: found[:size])


@st.composite
def meshes(draw: st.DrawFn, largest: int = 12, ranks: bool = True) -> MeshCase:
    """Meshes of up to four axes and `largest` ranks, with aliases and further factorizations."""
    sizes: dict[str, int] = {}
    for name in draw(st.permutations(AXIS_NAMES))[: draw(st.integers(1, 4))]:
        sizes[name] = draw(st.sampled_from([s for s in (1, 2, 2, 3, 4, 8) if s * math.prod(sizes.values()) <= largest]))
    axes = tuple(sizes)
    total = math.prod(sizes.values())
    grid = np.unravel_index(np.arange(total), tuple(sizes.values()))
    coordinates = dict(zip(axes, grid, strict=True))
    disjoint: list[tuple[str, ...]] = [axes]
    equations: list[str] = []
    for index in range(draw(st.integers(0, 2))):
        parts = draw(st.permutations(axes))[: draw(st.integers(1, len(axes)))]
        rest = tuple(name for name in axes if name not in parts)
        joint = np.ravel_multi_index([coordinates[p] for p in parts], [sizes[p] for p in parts])
        number = math.prod(sizes[p] for p in parts)
        if draw(st.booleans()):
            new = [f"alias{index}"]
            cut = [number]
            equations.append(f"alias{index} = {' '.join(parts)}")
        else:
            cut = draw(factorizations(number, 2))
            new = [f"part{index}{letter}" for letter in "abc"[: len(cut)]]
            written = [f"{name}={size}" for name, size in zip(new, cut, strict=True)]
            equations.append(f"({' '.join(parts)}) = {' '.join(written)}")
        sizes.update(zip(new, cut, strict=True))
        coordinates.update(zip(new, np.unravel_index(joint, cut), strict=True))
        disjoint.append((*rest, *new))
    declaration = " ".join(f"{name}={sizes[name]}" for name in axes)
    given = draw(rank_maps(total)) if ranks else None
    try:
        mesh = Mesh(declaration, *equations, ranks=given)
    except SizeError as error:
        # A part can cut a digit, as 2 x 3 ranks in that order can't be 3 x 2: tests/test_layout.py.
        assume("it cuts" not in str(error))
        raise
    return MeshCase(
        mesh=mesh,
        declaration=declaration,
        equations=tuple(equations),
        ranks=tuple(range(total) if given is None else given),
        sizes=sizes,
        coordinates=coordinates,
        disjoint=tuple(disjoint),
    )


def ranks_through(case: MeshCase, names: Sequence[str], position: int) -> list[int]:
    """Ranks along the product of `names` through a position, by sorting what shares the other digits.

    Two positions are on one line where moving along `names` alone gets from one to the other: where
    every coordinate that isn't read by `names` agrees. The base axes, each minus what `names` read
    of it, say which those are.
    """
    joint = joint_coordinate(case, names)
    apart = complement_key(case, names)
    line = [p for p in range(len(case.ranks)) if apart[p] == apart[position]]
    return [case.ranks[p] for p in sorted(line, key=lambda p: joint[p])]


def joint_coordinate(case: MeshCase, names: Sequence[str]) -> np.ndarray:
    """The coordinate of each position on the product of `names`, the first the slowest."""
    found = np.zeros(len(case.ranks), dtype=int)
    for name in names:
        found = found * case.sizes[name] + case.coordinates[name]
    return found


def complement_key(case: MeshCase, names: Sequence[str]) -> list[int]:
    """Equal where two positions differ in `names` alone: what is left when their offset is taken away."""
    joint = joint_coordinate(case, names).tolist()
    # The first position with a coordinate is that coordinate's offset: all other digits are 0 there.
    return [position - joint.index(coordinate) for position, coordinate in enumerate(joint)]


# ---------------------------------------------------------------------------- specs and shapes


@dataclass(frozen=True)
class FactorCase:
    """A name of a dim, its size, and the axes that split it, major first."""

    name: str
    size: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class SpecCase:
    """A spec and a shape that it fits, with the same said as data."""

    spec: str
    shape: tuple[int, ...]
    dims: tuple[tuple[FactorCase, ...], ...]
    pending: tuple[tuple[str, tuple[str, ...]], ...] = ()


def place(axes: Sequence[str]) -> str:
    """`@tp`, `@(cp tp)` or nothing."""
    return "" if not axes else f"@{axes[0]}" if len(axes) == 1 else f"@({' '.join(axes)})"


def text_of(dims: Sequence[Sequence[FactorCase]], pending: Sequence[tuple[str, Sequence[str]]], open_size: bool) -> str:
    """The spec; with `open_size` the last factor of each group is left to the shape."""

    def group(*front: FactorCase, last: FactorCase) -> str:
        sizes = [f"={factor.size}" for factor in (*front, last)]
        sizes[-1] = "" if open_size and all(factor.size for factor in front) else sizes[-1]
        return f"({' '.join(f'{f.name}{n}{place(f.axes)}' for f, n in zip((*front, last), sizes, strict=True))})"

    texts = [f"{dim[0].name}{place(dim[0].axes)}" if len(dim) == 1 else group(*dim[:-1], last=dim[-1]) for dim in dims]
    return " ".join([*texts, *["|"][: len(pending)], *(f"{op}{place(axes)}" for op, axes in pending)])


EXTENTS = st.integers(0, 13) | st.sampled_from([0, 1, 16, 24])


@st.composite
def specs(draw: st.DrawFn, case: MeshCase, groups: bool = True, pending: bool = True) -> SpecCase:
    """A spec on a mesh with a shape: uneven sizes, sizes 0 and 1, factors of groups, pending axes."""
    names = list(draw(st.permutations(draw(st.sampled_from(case.disjoint)))))
    ndim = draw(st.integers(0, 3))
    places = draw(st.lists(st.integers(-2 if pending else -1, ndim - 1), min_size=len(names), max_size=len(names)))
    dims: list[tuple[FactorCase, ...]] = []
    for index in range(ndim):
        mine = tuple(name for name, at in zip(names, places, strict=True) if at == index)
        if not groups or draw(st.integers(0, 3)):
            dims.append((FactorCase(f"d{index}", draw(EXTENTS), mine),))
            continue
        factors = []
        count = draw(st.integers(2, 3))
        owner = draw(st.lists(st.integers(0, count - 1), min_size=len(mine), max_size=len(mine)))
        for at in range(count):
            axes = tuple(name for name, o in zip(mine, owner, strict=True) if o == at)
            parts = math.prod(case.sizes[name] for name in axes)
            factors.append(FactorCase(f"d{index}{'abc'[at]}", parts * draw(st.integers(1, 3)), axes))
        dims.append(tuple(factors))
    waiting = [name for name, at in zip(names, places, strict=True) if at == -2]
    ops = draw(st.lists(st.sampled_from(["sum", "mean", "max", "min"]), min_size=len(waiting), max_size=len(waiting)))
    unresolved = tuple((op, (name,)) for op, name in zip(ops, waiting, strict=True))
    shape = tuple(math.prod(factor.size for factor in dim) for dim in dims)
    return SpecCase(text_of(dims, unresolved, draw(st.booleans())), shape, tuple(dims), unresolved)


@st.composite
def sharded(draw: st.DrawFn, groups: bool = True, pending: bool = True) -> tuple[MeshCase, SpecCase]:
    """A mesh and a spec on it."""
    case = draw(meshes())
    return case, draw(specs(case, groups, pending))


def nested(extent: int, sizes: Sequence[int], coordinates: Sequence[int]) -> list[int]:
    """Which of `extent` elements lie at these coordinates: `torch.chunk` after `torch.chunk`."""
    piece = torch.arange(extent)
    for size, coordinate in zip(sizes, coordinates, strict=True):
        chunks = piece.chunk(size)
        # torch.chunk gives no empty pieces beyond the first.
        piece = chunks[coordinate] if coordinate < len(chunks) else piece[:0]
    return piece.tolist()


def elements(mesh: MeshCase, spec: SpecCase, position: int) -> tuple[np.ndarray, ...]:
    """Per dim, the indices that a position holds: each factor chunked, the dim as a numpy reshape."""
    found = []
    for dim in spec.dims:
        kept = [
            nested(f.size, [mesh.sizes[a] for a in f.axes], [int(mesh.coordinates[a][position]) for a in f.axes])
            for f in dim
        ]
        whole = np.arange(math.prod(f.size for f in dim)).reshape([f.size for f in dim])
        found.append(whole[np.ix_(*kept)].reshape(-1))
    return tuple(found)


def listed(indices: object) -> list[int]:
    """The elements of what `local_indices` says of a dim."""
    slices = indices if isinstance(indices, tuple) else (indices,)
    assert all(isinstance(s, slice) and s.step is None for s in slices)
    return [i for s in slices for i in range(s.start, s.stop)]
