"""Transfers drawn at random: meshes and rank sets on both sides, specs, shapes, dtypes, buckets; as text, for any rank.

>>> drawn = case(7)
>>> len(drawn.tensors) > 0, drawn == case(7)
(True, True)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import axes
from axes.algebra.transfers import Transfer

WORLD = 8
DTYPES = ("float32", "bfloat16", "float64", "int64", "bool", "float8_e4m3fn", "complex64")
RANKS = (
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 1, 2, 3),
    (4, 5, 6, 7),
    (2, 3, 4, 5, 6, 7),
    (0, 2, 4, 6),
    (1, 6),
    (5,),
    (3, 4, 5),
)
SHAPES = {
    1: [()],
    2: [(2,)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}


@dataclass(frozen=True)
class DrawnMesh:
    """A mesh as text. part: axes of a sub-mesh, which is the one that `rank` is in; all of them where it is empty."""

    declaration: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    part: tuple[str, ...] = ()
    rank: int = 0

    def made(self, make: Callable[..., axes.Mesh]) -> axes.Mesh:
        """The mesh, by `axes.Mesh` or by `axes.init_mesh`."""
        mesh = make(self.declaration, ranks=self.ranks)
        return mesh.at(self.rank)[self.part] if self.part else mesh


@dataclass(frozen=True)
class DrawnTensor:
    """A tensor: for each side its mesh, by number, and its spec."""

    name: str
    shape: tuple[int, ...]
    source: tuple[int, str]
    target: tuple[int, str]
    dtype: str
    to: str


@dataclass(frozen=True)
class DrawnTransfer:
    """A transfer in text and numbers."""

    meshes: tuple[DrawnMesh, ...]
    tensors: tuple[DrawnTensor, ...]
    bucket_mb: float

    def plan(self, make: Callable[..., axes.Mesh]) -> Transfer:
        """What `axes.transfer` makes of it."""
        meshes = [mesh.made(make) for mesh in self.meshes]
        sides = [{each.name: getattr(each, side) for each in self.tensors} for side in ("source", "target")]
        specs = [{name: spec for name, (_, spec) in side.items()} for side in sides]
        where = [{name: meshes[number] for name, (number, _) in side.items()} for side in sides]
        like = {each.name: Like(each.shape, each.dtype) for each in self.tensors}
        dtypes = {each.name: each.to for each in self.tensors}
        return axes.transfer(*specs, *where, like, dtype=dtypes, bucket_mb=self.bucket_mb)


@dataclass(frozen=True)
class Like:
    """What says of a tensor its shape and dtype."""

    shape: tuple[int, ...]
    dtype: str


def case(seed: int) -> DrawnTransfer:
    """The transfer of a seed."""
    draw = random.Random(seed)
    sides = [[_mesh(draw, names) for _ in range(draw.choice((1, 1, 2)))] for names in ("abc", "def")]
    if draw.random() < 0.15:
        sides[1] = sides[0]
    meshes = (*sides[0], *sides[1])
    tensors = []
    for number in range(draw.randint(1, 5)):
        source, target = draw.randrange(len(sides[0])), len(sides[0]) + draw.randrange(len(sides[1]))
        dims = _dims(draw, [meshes[source], meshes[target]])
        shape = tuple(math.prod(sizes) for sizes in dims)
        specs = [_spec(draw, dims, meshes[at]) for at in (source, target)]
        dtype = draw.choice(DTYPES)
        to = draw.choice(("float32", "bfloat16")) if dtype in ("float32", "float64") and draw.random() < 0.5 else dtype
        tensors.append(DrawnTensor(f"t{number}", shape, (source, specs[0]), (target, specs[1]), dtype, to))
    return DrawnTransfer(meshes, tuple(tensors), draw.choice((1e-4, 1e-3, 64)))


def _mesh(draw: random.Random, names: str) -> DrawnMesh:
    """A mesh: of few, as it takes processes long to make one that they haven't had."""
    ranks = list(draw.choice(RANKS))
    if draw.random() < 0.4:
        random.Random(len(ranks)).shuffle(ranks)
    sizes = draw.choice(SHAPES[len(ranks)])
    found = tuple(names[: len(sizes)] or names[:1])
    text = " ".join(f"{name}={size}" for name, size in zip(found, sizes or (1,), strict=True))
    if len(found) > 1 and draw.random() < 0.25:
        part = tuple(draw.sample(found, draw.randint(1, len(found) - 1)))
        return DrawnMesh(text, tuple(ranks), found, part, draw.choice(ranks))
    return DrawnMesh(text, tuple(ranks), found)


def _sizes(mesh: DrawnMesh) -> dict[str, int]:
    every = dict(zip(mesh.names, (int(item.split("=")[1]) for item in mesh.declaration.split()), strict=True))
    return {name: every[name] for name in mesh.part or mesh.names}


def _dims(draw: random.Random, meshes: list[DrawnMesh]) -> list[tuple[int, ...]]:
    """For each dim its factors; of a group they divide by any axis."""
    common = math.lcm(*(size for mesh in meshes for size in _sizes(mesh).values()))
    found: list[tuple[int, ...]] = []
    for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3))):
        if draw.random() < 0.2 and common <= 12:
            found.append((draw.choice((1, 2, 3)), common, draw.choice((1, 2))))
        else:
            found.append((draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)),))
    return found


def _spec(draw: random.Random, dims: list[tuple[int, ...]], mesh: DrawnMesh) -> str:
    sizes = _sizes(mesh)
    places: dict[tuple[int, int], list[str]] = {}
    for name in draw.sample(list(sizes), len(sizes)):
        slots = [(dim, factor) for dim, factors in enumerate(dims) for factor in range(len(factors))]
        fits = [
            (dim, factor)
            for dim, factor in slots
            if len(dims[dim]) == 1
            or dims[dim][factor] % math.prod([sizes[name], *(sizes[other] for other in places.get((dim, factor), ()))])
            == 0
        ]
        if fits and draw.random() < 0.75:
            places.setdefault(draw.choice(fits), []).append(name)
    texts = []
    for dim, factors in enumerate(dims):
        parts = []
        for factor, size in enumerate(factors):
            at = places.get((dim, factor), [])
            place = "" if not at else f"@{at[0]}" if len(at) == 1 else f"@({' '.join(at)})"
            parts.append(f"x{dim}{'uvw'[factor]}={size}{place}" if len(factors) > 1 else f"x{dim}{place}")
        texts.append(f"({' '.join(parts)})" if len(parts) > 1 else parts[0])
    return " ".join(texts)
