"""Tensors by their definition, for tests of redistribution: no code of the library decides a value.

A case is a mesh `a=2 b=2 c=2` and, for each axis, what it does to a tensor: splits a dim, holds a
pending reduction, or neither. A global array has one entry for each coordinate on the axes that are
pending, so that summands differ; what a rank holds is cut from it piece by piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

AXES = ("a", "b", "c")


@dataclass(frozen=True)
class Placing:
    """For each dim the axes that split it, major first; the axes over which `op` is pending."""

    dims: tuple[tuple[str, ...], ...]
    pending: tuple[str, ...] = ()
    op: str = "sum"
    same: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        dims = [f"d{i}@({' '.join(axes)})" if axes else f"d{i}" for i, axes in enumerate(self.dims)]
        return " ".join([*dims, *([f"| {self.op}@({' '.join(self.pending)})"] if self.pending else [])])

    @property
    def replicated(self) -> tuple[str, ...]:
        """The axes that do nothing, `same` or not."""
        used = {axis for dim in self.dims for axis in dim} | set(self.pending)
        return tuple(axis for axis in AXES if axis not in used)

    def cut(self, whole: np.ndarray, coordinate: Mapping[str, int]) -> np.ndarray:
        """The tile of a rank: `torch.chunk`, nested in the written order."""
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                piece = -(-whole.shape[dim] // 2)
                at = coordinate[axis] * piece
                whole = np.take(whole, range(min(at, whole.shape[dim]), min(at + piece, whole.shape[dim])), axis=dim)
        return np.ascontiguousarray(whole)


def placings(ndim: int = 3) -> list[Placing]:
    """Each axis replicated, on one of the dims with every order of several on one dim, or pending."""
    found = []
    for roles in itertools.product((*range(ndim), "R", "P"), repeat=len(AXES)):
        on = [[axis for axis, role in zip(AXES, roles, strict=True) if role == dim] for dim in range(ndim)]
        pending = tuple(axis for axis, role in zip(AXES, roles, strict=True) if role == "P")
        orders = itertools.product(*(itertools.permutations(axes) for axes in on))
        found.extend(Placing(tuple(dims), pending) for dims in orders)
    return found


def pairs() -> list[tuple[Placing, Placing]]:
    """Every source and target whose pending axes are among the source's."""
    every = placings()
    return [(s, t) for s in every for t in every if set(t.pending) <= set(s.pending)]


def coordinate_of(rank: int) -> dict[str, int]:
    return {"a": rank >> 2 & 1, "b": rank >> 1 & 1, "c": rank & 1}


def varied(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers, other ones for each coordinate on the three axes: `[a, b, c, *shape]`."""
    generator = np.random.default_rng(seed)
    return generator.integers(-20, 21, size=(2, 2, 2, *shape)).astype(np.float64)


def at(values: np.ndarray, coordinate: Mapping[str, int], axes: Iterable[str]) -> np.ndarray:
    """The array of a coordinate, which varies along `axes` alone."""
    axes = set(axes)
    return values[tuple(coordinate[axis] if axis in axes else 0 for axis in AXES)]


def reduced(values: np.ndarray, coordinate: Mapping[str, int], over: Iterable[str], kept: Iterable[str], op: str):
    """`op` over some axes, at the coordinate on the kept ones."""
    over, kept = set(over), set(kept)
    for place, axis in reversed(list(enumerate(AXES))):
        if axis in over:
            values = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[op](values, axis=place)
        else:
            values = np.take(values, coordinate[axis] if axis in kept else 0, axis=place)
    return values


def expected(source: Placing, target: Placing, values: np.ndarray, coordinate: Mapping[str, int]) -> np.ndarray:
    """What a rank holds after the redistribution."""
    over = [axis for axis in source.pending if axis not in target.pending]
    return target.cut(reduced(values, coordinate, over, target.pending, source.op), coordinate)
