"""Generated shardings with everything in them, and what each rank then holds, by definition.

A case is a program: lines of Python that are run on every rank of an *island*, a part of the test
pool. A line that fails ends the case, and the lines up to it are what is reported. They can be pasted:

    g = Grid("a=2 b=2", ("both = a b",), order=(0, 2, 3, 1))
    W = whole((4, 6), 7)
    x = axes.shard(W, "d0@b (q=2 r@a)", mesh=g.mesh)
    check(x, W, g, "d0@b (q=2 r@a)")

A `Grid` is a mesh with the coordinates of every rank on every name, computed by numpy. `part` is what
a rank holds of a whole tensor: dims taken apart into factors, each cut by `torch.chunk`, what is
pending taken apart into summands or candidates. No code of the library has a part in either. `refusal`
says what the documentation says is refused, and in which words.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random as stdlib_random
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode  # noqa: F401 - a line of a program uses it

import axes
from tests.conftest import BEFORE_2_13
from tests.flow_cases import whole_result  # noqa: F401 - a line of a program calls it
from tests.strategies import nested, place

TIMEOUT = float(os.environ.get("AXES_LAWS_TIMEOUT", "40"))
"""Seconds that a rank waits for another in a case. Then it fails, and shows the case."""

Random = stdlib_random.Random
Pending = tuple[tuple[str, tuple[str, ...]], ...]

_base = 0
"""The first rank of this rank's island."""


def on_island(base: int) -> None:
    """Counts the ranks of grids from `base`."""
    global _base
    _base = base


# ---------------------------------------------------------------------------- meshes


@dataclass(frozen=True)
class Grid:
    """A mesh of this island: the text that declares it, its ranks in order, and a sub-mesh of it.

    An equation is `new = known...` or `(known...) = new=2 new=2`.
    """

    declaration: str
    equations: tuple[str, ...] = ()
    order: tuple[int, ...] | None = None
    sub: str = ""
    patience: float = 0.0
    """The timeout of its groups, which then aren't those of the same mesh without."""

    def __repr__(self) -> str:
        further = [repr(self.equations)] if self.equations else []
        further += [f"order={self.order}"] if self.order else []
        further += [f"sub={self.sub!r}"] if self.sub else []
        further += [f"patience={self.patience}"] if self.patience else []
        return f"Grid({', '.join([repr(self.declaration), *further])})"

    @cached_property
    def mesh(self) -> axes.Mesh:
        """The mesh of the library; every rank of the island calls this."""
        return _mesh(self, _base)

    @cached_property
    def declared(self) -> dict[str, int]:
        """The axes of the whole mesh with their sizes."""
        return {name: int(size) for name, size in (item.split("=") for item in self.declaration.split())}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the island in the order of the mesh."""
        return tuple(range(math.prod(self.declared.values()))) if self.order is None else self.order

    @cached_property
    def table(self) -> dict[str, np.ndarray]:
        """The coordinate of each position on each name."""
        grid = np.unravel_index(np.arange(len(self.ranks)), tuple(self.declared.values()))
        found = dict(zip(self.declared, grid, strict=True))
        sizes = dict(self.declared)
        for equation in self.equations:
            left, right = (side.strip() for side in equation.split(" = "))
            known = (left.strip("()") if left.startswith("(") else right).split()
            joint = np.ravel_multi_index([found[n] for n in known], [sizes[n] for n in known])
            if left.startswith("("):
                new = {name: int(size) for name, size in (item.split("=") for item in right.split())}
                found.update(zip(new, np.unravel_index(joint, tuple(new.values())), strict=True))
            else:
                new = {left: math.prod(sizes[n] for n in known)}
                found[left] = joint
            sizes.update(new)
        return found

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: int(coordinates.max()) + 1 for name, coordinates in self.table.items()}

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.sub.split()) if self.sub else tuple(self.declared)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names that are made of the axes of this mesh."""
        mine = self._key(self.axis_names)
        return tuple(name for name in self.table if len({*zip(mine, self.table[name], strict=True)}) == len({*mine}))

    def joint(self, names: Sequence[str]) -> np.ndarray:
        """The coordinate of each position on the product of names, the first the slowest."""
        found = np.zeros(len(self.ranks), dtype=int)
        for name in names:
            found = found * self.sizes[name] + self.table[name]
        return found

    def _key(self, names: Sequence[str]) -> list[int]:
        return [int(c) for c in self.joint(names)]

    @cached_property
    def here(self) -> int | None:
        """The position of this rank, None outside of the mesh."""
        rank = (dist.get_rank() if dist.is_initialized() else 0) - _base
        return self.ranks.index(rank) if rank in self.ranks else None

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """For each position which of the sub-meshes side by side it is on, a number from 0."""
        joint = self.joint(self.axis_names)
        first: dict[int, int] = {}
        for position, coordinate in enumerate(joint):
            first.setdefault(int(coordinate), position)
        # The first position with a coordinate is that coordinate's offset: all other digits are 0 there.
        keys = [position - first[int(joint[position])] for position in range(len(joint))]
        numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
        return tuple(numbers[key] for key in keys)

    @property
    def line(self) -> int:
        """That of this rank."""
        return 0 if self.here is None else self.lines[self.here]

    def overlap(self, one: str, two: str) -> bool:
        """Whether two names share a digit."""
        pairs = len({*zip(self._key([one]), self._key([two]), strict=True)})
        return pairs < self.sizes[one] * self.sizes[two]

    def as_axes(self, names: Sequence[str]) -> tuple[str, ...] | None:
        """The axes of the mesh, in order, whose product this product of names is; None where there are none."""
        wanted = self._key(names)
        real = [name for name in self.axis_names if self.sizes[name] > 1]
        for count in range(len(real) + 1):
            for chosen in itertools.permutations(real, count):
                if math.prod(self.sizes[n] for n in chosen) == max(wanted) + 1 and self._key(chosen) == wanted:
                    return chosen
        return None

    def pieces(self, text: str, shape: Sequence[int], position: int) -> list[list[int]]:
        """Per dim the indices that a position holds."""
        found = []
        for dim in read(text, shape)[0]:
            kept = []
            for _, size, names in dim:
                coordinates = [int(self.table[name][position]) for name in names]
                kept.append(nested(size, [self.sizes[name] for name in names], coordinates))
            sizes = [size for _, size, _ in dim]
            whole = np.arange(math.prod(sizes)).reshape(sizes)
            found.append(whole[np.ix_(*kept)].reshape(-1).tolist())
        return found


@functools.cache
def _mesh(grid: Grid, base: int) -> axes.Mesh:
    ranks = [base + rank for rank in grid.ranks]
    own = {name: axes.GroupOptions(timeout=grid.patience) for name in grid.declared} if grid.patience else None
    options = {"ranks": ranks, "options": own, "device_type": "cpu", "timeout": TIMEOUT}
    mesh = axes.init_mesh(grid.declaration, *grid.equations, **options)
    return mesh[tuple(grid.sub.split())] if grid.sub else mesh


# ---------------------------------------------------------------------------- specs


Factor = tuple[str | None, int, tuple[str, ...]]
"""A name, None for a number; a size; the axes that split it, major first."""

Forms = list[list[tuple[str | None, int]]]
"""Of each dim the names and sizes, more than one where it is a group."""


def words(text: str) -> list[str]:
    """What stands between spaces that aren't within parentheses."""
    found, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == " " and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [word for word in found if word]


@functools.lru_cache(maxsize=4096)
def read(text: str, shape: Sequence[int]) -> tuple[tuple[tuple[Factor, ...], ...], Pending]:
    """The factors of each dim of a spec, for a tensor of this shape, and what is pending."""
    before, _, after = text.partition("|")
    dims = []
    for word, extent in zip(words(before), shape, strict=True):
        if not word.startswith("("):
            name, _, where = word.partition("@")
            dims.append(((name, extent, _axes(where)),))
            continue
        inside, _, where = _closed(word)
        if where:
            dims.append(((word, extent, _axes(where)),))
            continue
        factors = []
        for item in words(inside):
            name, _, at = item.partition("@")
            name, _, size = name.partition("=")
            number = name if name.isdigit() else size
            factors.append((None if name.isdigit() else name, int(number) if number else None, _axes(at)))
        known = math.prod(size for _, size, _ in factors if size is not None)
        dims.append(tuple((n, extent // known if s is None else s, a) for n, s, a in factors))
        if all(not a for _, _, a in dims[-1]):
            dims[-1] = ((word, extent, ()),)
    pending = tuple((op, _axes(where)) for op, _, where in (word.partition("@") for word in words(after)))
    return tuple(dims), pending


def cuts_between_names(grid: Grid, one: str, other: str, forms: Sequence[Sequence[tuple[str | None, int]]]) -> bool:
    """Whether a group that one text splits as a whole and the other by its names is cut between names."""
    texts = [words(one.partition("|")[0]), words(other.partition("|")[0])]
    for whole, by_names, form in (*zip(*texts, forms, strict=True), *zip(*texts[::-1], forms, strict=True)):
        if not whole.startswith("(") or "@" not in _closed(by_names)[0]:
            continue
        sizes, at = [size for _, size in form if size != 1] or [1], 0
        for name in _axes(_closed(whole)[2]):
            while sizes[at] == 1 and at + 1 < len(sizes):
                at += 1
            if len(sizes) > 1 and sizes[at] % grid.sizes[name]:
                return True
            sizes[at] //= grid.sizes[name]
    return False


def _axes(where: str) -> tuple[str, ...]:
    return tuple(where.strip("()").split())


def _closed(word: str) -> tuple[str, str, str]:
    depth = 0
    for at, letter in enumerate(word):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return word[1:at], word[at + 1 : at + 2], word[at + 2 :]
    raise AssertionError(word)


def pending_text(pending: Pending) -> str:
    return "".join([" |"] + [f" {op}{place(names)}" for op, names in pending]) if pending else ""


def without_pending(text: str) -> str:
    return text.partition("|")[0].strip()


LINEAR = ("sum", "mean")


def commute(one: str, two: str) -> bool:
    return one == two or (one in LINEAR and two in LINEAR)


def refusal(grid: Grid, text: str, shape: Sequence[int]) -> str | None:
    """How the error reads where a DTensor on this mesh can't have this sharding; None where it can.

    A pattern: where there are several reasons, any of them is given.
    """
    dims, pending = read(text, tuple(shape))
    reasons = [_factor_refusal(grid, dims), *(_dim_refusal(grid, dim) for dim in dims)]
    if any(grid.as_axes(names) is None for _, names in pending):
        reasons.append(PART_OF_AN_AXIS)
    kinds = {kind for dim in dims for kind in _strides(grid, dim)}
    if len(kinds) > 1:
        reasons.append("DTensor can't gather")
    if _pending_order(grid, pending):
        reasons.append(PENDING_ORDER)
    found = {reason for reason in reasons if reason}
    return "|".join(sorted(found)) or None


PART_OF_AN_AXIS = "isn't a product of whole axes"
PENDING_ORDER = "order"
INDIVISIBLE = "doesn't divide into"
UNEVEN = "uneven parts, which DTensor"
TWO_ON_A_FACTOR = "two axes on a dim with an unsplit factor in front"


def _factor_refusal(grid: Grid, dims: Sequence[Sequence[Factor]]) -> str | None:
    """A factor of a group that is split must divide."""
    for dim in dims:
        for _, size, names in dim:
            if len(dim) > 1 and size % math.prod(grid.sizes[n] for n in names):
                return INDIVISIBLE
    return None


def _cuts(grid: Grid, dim: Sequence[Factor]) -> list[tuple[int, str | None]] | None:
    """A dim from the major side: `(size, axis of the mesh)`, None for what stays whole, nothing of size 1."""
    found: list[tuple[int, str | None]] = []
    for _, size, names in dim:
        mine = grid.as_axes(names)
        if mine is None:
            return None
        found += [(grid.sizes[name], name) for name in mine]
        if len(dim) > 1:
            found.append((size // math.prod(grid.sizes[n] for n in names), None))
    return [(size, name) for size, name in found if size != 1]


def _dim_refusal(grid: Grid, dim: Sequence[Factor]) -> str | None:
    cuts = _cuts(grid, dim)
    if cuts is None:
        return PART_OF_AN_AXIS
    split = [name for _, name in cuts if name]
    behind = any(name and any(other is None for _, other in cuts[:at]) for at, (_, name) in enumerate(cuts))
    if len(split) > 1 and behind:
        return TWO_ON_A_FACTOR
    (_, size, names), *further = dim
    if further or size % math.prod(grid.sizes[n] for n in names) == 0:
        return None
    in_order = sorted(split, key=grid.axis_names.index)
    if split != in_order:
        return UNEVEN
    for position in range(len(grid.ranks)):
        mine, theirs = (
            nested(size, [grid.sizes[n] for n in order], [int(grid.table[n][position]) for n in order])
            for order in (names, in_order)
        )
        if mine != theirs:
            return UNEVEN
    return None


def _strides(grid: Grid, dim: Sequence[Factor]) -> set[str]:
    """Whether DTensor has to say a factor behind an unsplit one, or another order of axes, by a strided shard."""
    cuts = _cuts(grid, dim) or []
    split = [name for _, name in cuts if name]
    found = set()
    for at, (_, name) in enumerate(cuts):
        if name and any(other is None for _, other in cuts[:at]):
            found.add("factor")
    if split != sorted(split, key=grid.axis_names.index):
        found.add("order")
    return found


def _pending_order(grid: Grid, pending: Pending) -> bool:
    """Whether reductions that don't commute are in another order than their axes are in the mesh."""
    flat = [(op, axis) for op, names in pending for axis in grid.as_axes(names) or ()]
    for at, (op, axis) in enumerate(flat):
        for other, later in flat[at + 1 :]:
            if not commute(op, other) and grid.axis_names.index(axis) > grid.axis_names.index(later):
                return True
    return False


# ---------------------------------------------------------------------------- what a rank holds


def whole(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly."""
    numbers = np.random.default_rng(seed).integers(-4, 5, (2, *shape))
    value = torch.from_numpy(np.asarray(numbers[0]))
    if dtype.is_complex:
        return torch.complex(value.double(), torch.from_numpy(np.asarray(numbers[1])).double()).to(dtype)
    return (value > 0) if dtype is torch.bool else (value + 40 * (dtype is torch.uint8)).to(dtype)


def laid(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same tensor in other places of memory."""
    if how == "transposed":
        order = list(reversed(range(x.ndim)))
        return x.permute(order).contiguous().permute(order)
    if how == "strided":
        room = x.new_zeros([2 * n + 1 for n in x.shape])
        view = room[tuple(slice(1, None, 2) for _ in x.shape)]
        return view.copy_(x)
    if how == "offset":
        room = torch.cat([x.new_zeros(3), x.reshape(-1)])
        return room[3:].view(x.shape)
    if how == "expanded" and x.ndim and x.shape[0] and torch.equal(x, row := x[:1].expand_as(x)):
        return row
    if how == "lazy" and x.is_complex():  # a view that conjugates, or that negates
        return x.conj().resolve_conj().conj()
    if how == "lazy" and x.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(x), -x).conj().imag
    assert how in ("dense", "expanded", "lazy"), how
    return x.clone(memory_format=torch.contiguous_format)


def cut(value: torch.Tensor, grid: Grid, spec: str, position: int) -> torch.Tensor:
    for dim, indices in enumerate(grid.pieces(without_pending(spec), tuple(value.shape), position)):
        value = value.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return value.clone(memory_format=torch.contiguous_format)


def part(
    value: torch.Tensor, grid: Grid, spec: str, seed: int = 0, was: tuple[Grid, str] | None = None
) -> torch.Tensor:
    """What this rank holds of a whole tensor; what is pending is taken apart at random.

    `was` is an earlier grid and spec, of whose pending reductions some have been done since.
    """
    if grid.here is None:
        return value.new_empty(0)
    value = value.detach()
    left, origin = _reductions(grid, spec, value.shape), _reductions(*(was or (grid, spec)), value.shape)
    values = _apart(value, origin, seed)
    kept = [at for at, (_, mine) in enumerate(origin) if any((mine == other).all() for _, other in left)]
    here = _rank_of(grid)
    for at in [at for at in range(len(origin)) if at not in kept]:  # the first is resolved first
        op, _ = origin[at]
        merged: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for key, piece in sorted(values.items(), key=lambda pair: pair[0][at]):
            merged.setdefault((*key[:at], -1, *key[at + 1 :]), []).append(piece)
        values = {key: _reduced(op, pieces) for key, pieces in merged.items()}
    key = tuple(int(coordinates[here]) if at in kept else -1 for at, (_, coordinates) in enumerate(origin))
    return cut(values[key], grid, spec, grid.here)


def _rank_of(grid: Grid) -> int:
    assert grid.here is not None
    return grid.ranks[grid.here]


def _reductions(grid: Grid, spec: str, shape: Sequence[int]) -> list[tuple[str, np.ndarray]]:
    """Each pending reduction over one axis, with the coordinate of each rank of the island; -1 outside."""
    found = []
    for op, names in read(spec, tuple(shape))[1]:
        for name in names:
            coordinates = np.full(8, -1)
            coordinates[list(grid.ranks)] = grid.table[name]
            found.append((op, coordinates))
    return found


def _apart(value: torch.Tensor, entries: Sequence[tuple[str, np.ndarray]], seed: int) -> dict[Any, torch.Tensor]:
    """Values by their coordinates on the pending axes, which `entries` make `value` of, the first first."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[tuple[int, ...], torch.Tensor] = {(): value}
    for op, coordinates in reversed(entries):
        count = int(coordinates.max()) + 1
        values = {
            (i, *key): piece
            for key, total in values.items()
            for i, piece in enumerate(_summands(op, count, total, generator))
        }
    return values


def _summands(op: str, count: int, total: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    noise = [torch.randint(0, 4, total.shape, generator=generator) for _ in range(count)]
    if op in ("max", "min"):
        chosen = int(torch.randint(0, count, (), generator=generator))
        if total.dtype is torch.bool:
            return [
                total if i == chosen else total & (n > 1) if op == "max" else total | (n > 1)
                for i, n in enumerate(noise)
            ]
        sign = -1 if op == "max" else 1
        if total.dtype is torch.uint8:  # a summand of few bits has less room
            room = total if op == "max" else 255 - total
            noise = [torch.minimum(n, room) for n in noise]
        return [total + (sign * n).to(total.dtype) * (i != chosen) for i, n in enumerate(noise)]
    last = total * (count if op == "mean" else 1) - sum(noise[1:], torch.zeros_like(noise[0])).to(total.dtype)
    return [last, *[n.to(total.dtype) for n in noise[1:]]]


def _reduced(op: str, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(pieces))
    if op in ("max", "min"):
        return getattr(stacked, f"a{op}")(0)
    total = stacked.sum(0, dtype=stacked.dtype)
    return total / len(pieces) if op == "mean" else total


# ---------------------------------------------------------------------------- what lines of a program call


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.01, torch.complex64: 1e-5}


def same(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """The same numbers, to the last but a few bits."""
    found, expected = found.detach(), expected.detach()
    assert type(found) is torch.Tensor or not isinstance(found, DTensor), f"{what} is a DTensor"
    assert found.shape == expected.shape, f"{what} {list(found.shape)} for {list(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what} {found.dtype} for {expected.dtype}"
    tolerance = TOLERANCE.get(found.dtype, 1e-9)
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        wrong = ~torch.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        first = tuple(wrong.nonzero()[0].tolist())
        numbers = f"{found[first].item()} for {expected[first].item()} at {list(first)}"
        raise AssertionError(f"{what} wrong numbers, {int(wrong.sum())} of {wrong.numel()}: {numbers}")


def held(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor of this rank. (`detach` of a DTensor is an operation, whose result torch has to work out.)"""
    with torch.no_grad():
        return x.to_local() if isinstance(x, DTensor) else x


def check(
    x: torch.Tensor | None,
    value: torch.Tensor,
    grid: Grid,
    spec: str,
    seed: int = 0,
    was: tuple[Grid, str] | None = None,
) -> None:
    """Whether this rank holds its part of a whole tensor."""
    assert x is not None, "there is none"
    if isinstance(x, DTensor):
        assert tuple(x.shape) == tuple(value.shape), f"{list(x.shape)} for {list(value.shape)}"
        assert x.dtype == value.dtype, f"{x.dtype} for {value.dtype}"
    if grid.here is None:
        return
    same(held(x), part(value, grid, spec, seed, was), f"the shard of {list(value.shape)} by '{spec}':")


@contextlib.contextmanager
def refused(pattern: str) -> Iterator[None]:
    """An error of the library with these words comes."""
    try:
        yield
    except axes.AxesError as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(f"refused for another reason than {pattern!r}: {error}") from error
    else:
        raise AssertionError(f"not refused: {pattern!r}")


def uses_groups_of(x: DTensor, mesh: axes.Mesh) -> bool:
    """Whether a DTensor communicates over the groups of a mesh, and not over others of the same ranks."""
    names = [name for name, size in mesh.shape.items() if size > 1]
    return all(x.device_mesh.get_group(name) is mesh.axis(name).group for name in names)


def either(value: Callable[[], torch.Tensor], expected: torch.Tensor, pattern: str) -> None:
    """The right value, or an error of the library with these words."""
    try:
        found = value()
    except axes.AxesError as error:
        if not re.search(pattern, str(error)):
            raise AssertionError(f"refused for another reason than {pattern!r}: {error}") from error
    else:
        same(found, expected)


def owns(x: torch.Tensor | None) -> None:
    """Whether a gradient has memory of its own, and no more than it needs.

    What was gathered from uneven parts may keep their padding: less than one row for each of the ranks.
    """
    assert x is not None, "there is no gradient"
    local = held(x)
    ranks = x.device_mesh.size() if isinstance(x, DTensor) else dist.get_world_size()
    room = [n + ranks - 1 if n == whole or x is local else n for n, whole in zip(local.shape, x.shape, strict=True)]
    owned, needed = local.untyped_storage().nbytes(), max(1, math.prod(room)) * local.itemsize
    assert owned <= needed, f"the gradient holds {owned} bytes for {local.numel() * local.itemsize}"


def whole_of(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return axes.unshard(x)


def is_tied(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a tensor has the memory of another, or several elements in one place."""
    repeated = any(size > 1 and stride == 0 for size, stride in zip(y.shape, y.stride(), strict=True))
    return repeated or y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def fails(change: Callable[[], object]) -> bool:
    """Whether torch or the library refuses a change in place, or sees in backward that there was one."""
    try:
        change()
    except axes.AxesError:
        return True
    except (RuntimeError, NotImplementedError) as error:
        if "imed out" in str(error) or "onnection" in str(error):
            raise
        return True
    return False


def resolved(x: torch.Tensor, grid: Grid, spec: str, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor of plain shards, what is pending done: what all ranks have, put together here."""
    everyone = _gathered(x.detach(), grid)
    if grid.here is None:
        return x
    line = [position for position in range(len(grid.ranks)) if grid.lines[position] == grid.line]
    entries = _reductions(grid, spec, shape)
    values: dict[tuple[int, ...], torch.Tensor] = {}
    for position in line:
        key = tuple(int(coordinates[grid.ranks[position]]) for _, coordinates in entries)
        value = values.setdefault(key, torch.full(tuple(shape), math.nan, dtype=x.dtype))
        pieces = grid.pieces(without_pending(spec), tuple(shape), position)
        at = np.ix_(*pieces) if pieces else ()
        mine, known = everyone[position], torch.from_numpy(np.asarray(value.numpy()[at]))
        assert tuple(mine.shape) == tuple(known.shape), f"{list(mine.shape)} for {list(known.shape)} by '{spec}'"
        seen = ~known.isnan()
        assert torch.allclose(known[seen], mine[seen], equal_nan=True), f"replicas by '{spec}' differ"
        value.numpy()[at] = mine.resolve_conj().resolve_neg().numpy()
    for at in range(len(entries)):
        merged: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for key, value in values.items():
            merged.setdefault((*key[:at], -1, *key[at + 1 :]), []).append(value)
        values = {key: _reduced(entries[at][0], pieces) for key, pieces in merged.items()}
    (value,) = values.values()
    return value


@functools.cache
def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    return axes.init_mesh(f"all={len(ranks)}", ranks=ranks, device_type="cpu", timeout=TIMEOUT).axis("all").group


def _gathered(x: torch.Tensor, grid: Grid) -> list[torch.Tensor]:
    """What each position of a mesh holds; every rank of the mesh calls it."""
    ranks = tuple(sorted(_base + rank for rank in grid.ranks))
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, x, group=_group(ranks))
    return [found[ranks.index(_base + rank)] for rank in grid.ranks]


SCRIPT = """import torch
import axes
from tests.whole_cases import *

def case():
{lines}

if __name__ == "__main__":
    axes.launch(case, {ranks})
"""


_running: list[Any] = [None]
"""The program that runs: what is shown where it doesn't end."""


def watch() -> None:
    """Shows the case in which this rank hangs, on stderr."""

    def look() -> None:
        seen, since = None, 0.0
        while True:
            time.sleep(1.0)
            program = _running[0]
            state = None if program is None else (id(program), len(program.lines))
            if state != seen:
                seen, since = state, time.monotonic()
            elif state is not None and time.monotonic() - since > 1.5 * TIMEOUT:
                print(f"rank {dist.get_rank()} waits in\n{program}", file=sys.stderr, flush=True)
                since = math.inf

    if not any(thread.name == "watch" for thread in threading.enumerate()):
        threading.Thread(target=look, name="watch", daemon=True).start()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


TORCH_REFUSES = (
    # an operation of torch's on a tensor of which a factor of a dim is split
    r"use_strided_shard_as_shard_order is True, but placements: .*_StridedShard.* "
    "is unable to be interpreted into a corresponding shard_order",
    # autograd's sum of two gradients that are pending, one as a sum and one as a mean
    r"Redistribution from one partial type \(P\(\w+\)\) to another \(P\(\w+\)\) is unsupported\.",
    # the same of a split gradient and one that is pending as a mean
    r"redistribute from \S+ to P\(avg\) not supported yet",
)
"""What torch before 2.13 refuses by itself."""


class TorchRefuses(Exception):
    """One of these: nothing can be said of the rest of the case. Every rank of the mesh has it at the same line."""


class Program:
    """Lines that are run as they are written. `names` are the variables."""

    def __init__(self, names: dict[str, Any] | None = None) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {**globals(), "torch": torch, "axes": axes, **(names or {})}

    def do(self, line: str) -> None:
        self.lines.append(line)
        _running[0] = self
        try:
            exec(_compiled(line), self.names)
        except (ValueError, AssertionError, RuntimeError) as error:
            if not BEFORE_2_13 or not any(re.fullmatch(refusal, str(error)) for refusal in TORCH_REFUSES):
                raise
            raise TorchRefuses(str(error)) from error
        finally:
            _running[0] = None

    def both(self, line: str, *names: str) -> None:
        """A line for the sharded tensors, in small letters, and for the whole ones, in capitals."""
        self.do(line)
        for name in names:
            line = re.sub(rf"\b{name}\b", name.upper(), line)
        self.do(line)

    def refuse(self, line: str, pattern: str) -> None:
        self.do(f"with refused({pattern!r}):\n    {line}")

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def script(self, ranks: int) -> str:
        """A file that runs it on so many ranks."""
        return SCRIPT.format(lines=textwrap.indent(str(self), "    "), ranks=ranks)


@functools.lru_cache(maxsize=1024)
def _compiled(line: str) -> Any:
    return compile(line, "<case>", "exec")


# ---------------------------------------------------------------------------- drawing

MESHES: dict[int, tuple[Grid, ...]] = {
    1: (Grid("tp=1"), Grid("a=1 b=1", ("both = a b",))),
    2: (
        Grid("tp=2"),
        Grid("a=2 b=1", ("also = a",)),
        Grid("p=1 q=2"),
        Grid("a=2 b=1", sub="a"),
    ),
    3: (Grid("tp=3"), Grid("a=3 b=1"), Grid("p=1 q=3", ("also = q",))),
    4: (
        Grid("a=2 b=2", ("both = a b", "swap = b a")),
        Grid("p=2 q=2", ("also = p",)),
        Grid("tp=4", ("(tp) = c=2 e=2",)),
        Grid("a=2 one=1 b=2"),
        Grid("b=2 a=2"),
        Grid("a=2 b=2", ("both = a b",), sub="b"),
        Grid("a=2 b=2", ("both = a b",), sub="b a"),
        Grid("a=2 b=2", ("both = a b",), sub="both"),
    ),
    6: (
        Grid("a=3 b=2", ("both = a b", "swap = b a")),
        Grid("p=2 q=3"),
        Grid("tp=6", ("(tp) = c=2 e=3",)),
        Grid("a=3 b=2", sub="a"),
    ),
    8: (
        Grid("a=2 b=2 c=2", ("ab = a b", "ca = c a")),
        Grid("dp=2 tp=4", ("(tp) = c=2 e=2",)),
        Grid("tp=8"),
        Grid("p=4 q=2", ("both = p q", "(p q) = x=2 y=4")),
        Grid("a=2 b=2 c=2", ("ab = a b", "ca = c a"), sub="c a"),
        Grid("a=2 b=2 c=2", ("ab = a b", "ca = c a"), sub="ab c"),
    ),
}
"""The meshes of an island of so many ranks; the first has the most to it."""

ORDERS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 0),),
    3: ((2, 0, 1),),
    4: ((0, 2, 3, 1), (3, 1, 2, 0)),
    6: ((5, 0, 2, 4, 1, 3),),
    8: ((0, 2, 4, 6, 1, 3, 5, 7), (3, 7, 1, 0, 6, 2, 5, 4)),
}

ELSEWHERE: dict[int, tuple[Grid, ...]] = {
    2: (Grid("z=1", order=(1,)), Grid("z=1", order=(0,))),
    3: (Grid("z=2", order=(2, 0)), Grid("z=1", order=(1,))),
    4: (Grid("z=2", order=(3, 1)), Grid("z=3", order=(0, 1, 2)), Grid("z=1", order=(2,))),
    6: (Grid("y=2 z=2", order=(5, 1, 2, 0)), Grid("z=3", order=(3, 4, 5))),
    8: (Grid("z=3", order=(7, 2, 5)), Grid("y=2 z=2", order=(4, 5, 6, 7)), Grid("z=1", order=(3,))),
}
"""Meshes of some ranks of an island."""

PATIENT = {2: Grid("w=2", patience=TIMEOUT + 1), 4: Grid("v=2 w=2", ("vw = v w",), patience=TIMEOUT + 1)}
"""Meshes with groups of their own, whose axes no other mesh has: torch takes DeviceMeshes with the same axes for one."""

EXTENTS = (0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 12, 12, 16, 24)
FLOATS = (torch.float64,) * 6 + (torch.float32, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128)
LAYOUTS = ("dense", "dense", "transposed", "strided", "offset", "expanded", "lazy")
OPS = ("sum", "sum", "mean", "max", "min")


class Draw:
    """One case: a program, what is drawn for it, and which features it has."""

    def __init__(self, seed: str, ranks: int) -> None:
        self.random = Random(seed)
        self.ranks = ranks
        self.program = Program()
        self.features: set[str] = set()
        self.grids: dict[Grid, str] = {}

    @property
    def judged(self) -> bool:
        """Whether anything was compared: what was drawn may have been none of the law's cases."""
        return any(
            re.match(r"check\(|same\(|with refused|assert |if not seen: same", line) for line in self.program.lines
        )

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def seed(self) -> int:
        return self.random.randrange(1000)

    # meshes

    def grid(self, elsewhere: float = 0.0, sub: bool = True, computed: bool = False) -> tuple[Grid, str]:
        """A grid, and the variable that has it.

        Where torch's operations are `computed` on it, seldom one of three axes: torch takes a tenth of a
        second to plan a product on those.
        """
        random = self.random
        if self.chance(elsewhere) and self.ranks in ELSEWHERE:
            grid = random.choice(ELSEWHERE[self.ranks])
            self.features.add("other ranks")
        else:
            choices = [grid for grid in MESHES[self.ranks] if sub or not grid.sub]
            if computed and self.chance(0.7):
                choices = [grid for grid in choices if len(grid.axis_names) < 3]
            grid = choices[0] if self.chance(0.25) else random.choice(choices)
            if self.chance(0.35) and self.ranks in ORDERS:
                grid = replace(grid, order=random.choice(ORDERS[self.ranks]))
            if self.chance(0.06) and not grid.sub and grid.order is None and self.ranks in (2, 4):
                grid = PATIENT[self.ranks]
                self.features.add("groups of its own")
        if grid.order is not None and list(grid.order) != sorted(grid.order):
            self.features.add("permuted ranks")
        if grid.sub:
            self.features.add("sub-mesh")
        if grid.here is not None and max(grid.lines) > 0:
            self.features.add("sub-universe")
        return grid, self.named(grid)

    def named(self, grid: Grid) -> str:
        if grid not in self.grids:
            self.grids[grid] = f"g{len(self.grids)}"
            self.program.do(f"{self.grids[grid]} = {grid!r}; m{self.grids[grid][1:]} = {self.grids[grid]}.mesh")
        return self.grids[grid]

    # tensors

    def shape(self, ndim: int | None = None, most: int = 500, extents: Sequence[int] = EXTENTS) -> tuple[int, ...]:
        ndim = self.random.choice((0, 1, 1, 2, 2, 2, 3, 3)) if ndim is None else ndim
        while True:
            found = tuple(self.random.choice(extents) for _ in range(ndim))
            if math.prod(found) <= most:
                return found

    def forms(self, shape: Sequence[int], groups: float = 0.45, numbers: float = 0.15) -> Forms:
        """For each dim its names with their sizes; a number has no name."""
        found: Forms = []
        for index, extent in enumerate(shape):
            name = f"d{index}"
            if not self.chance(groups):
                found.append([(name, extent)])
                continue
            count = self.random.choice((2, 2, 3))
            sizes = self.factorization(extent, count)
            bare = [self.chance(numbers) and size > 0 for size in sizes]
            found.append([(None if bare[i] else f"{name}{'xyz'[i]}", size) for i, size in enumerate(sizes)])
        return found

    def factorization(self, extent: int, count: int) -> list[int]:
        if extent == 0:  # text can't say 0, so that is the size that is left to the shape
            sizes = [0, *(self.random.choice((1, 2, 4)) for _ in range(count - 1))]
            self.random.shuffle(sizes)
            return sizes
        sizes, left = [], extent
        for _ in range(count - 1):
            size = self.random.choice([d for d in range(1, left + 1) if left % d == 0])
            sizes.append(size)
            left = left // size
        sizes.append(left)
        self.random.shuffle(sizes)
        return sizes

    def family(self, grid: Grid) -> list[str]:
        """Names of a grid that don't overlap, in any order."""
        found: list[str] = []
        own = list(grid.axis_names)
        pool = own if self.chance(0.6) else list(grid.names)
        for name in self.random.sample(pool, len(pool)):
            if not any(grid.overlap(name, other) or name == other for other in found):
                found.append(name)
        if not set(found) <= set(own):
            self.features.add("alias")
        return found

    def spec(
        self,
        grid: Grid,
        forms: Forms,
        pending: float = 0.0,
        keep: Pending = (),
        ops: Sequence[str] = OPS,
        indivisible: float = 0.03,
        replicated: float = 0.2,
    ) -> str:
        """A spec of these names: axes of the grid on dims, in groups and out of them, or pending."""
        random = self.random
        busy = [name for _, names in keep for name in names]
        free = [n for n in self.family(grid) if not any(n == b or grid.overlap(n, b) for b in busy)]
        on: list[list[str]] = [[] for _ in forms]
        waiting: list[tuple[str, tuple[str, ...]]] = list(keep)
        for name in free:
            if self.chance(pending):
                others = [op for op in ops if waiting and op != waiting[-1][0]]
                waiting.append((random.choice(others if others and self.chance(0.5) else ops), (name,)))
            elif forms and not self.chance(replicated):
                random.choice(on).append(name)
        if pending:
            random.shuffle(waiting)
        dims = [self.dim(grid, form, mine, indivisible) for form, mine in zip(forms, on, strict=True)]
        return " ".join(dims) + pending_text(tuple(waiting))

    def dim(self, grid: Grid, form: Sequence[tuple[str | None, int]], names: list[str], indivisible: float) -> str:
        random = self.random
        if len(form) == 1:
            ((name, _),) = form
            return f"{name}{place(names)}"
        bound = {i: [] for i in range(len(form))}
        whole = self.chance(0.3)
        if not whole:
            for name in names:
                parts = [math.prod(grid.sizes[n] for n in [*bound[i], name]) for i in bound]
                fits = [i for i in bound if form[i][1] % parts[i] == 0]
                if self.chance(indivisible):
                    fits = list(bound)
                if fits:
                    bound[random.choice(fits)].append(name)
                # else it is left out: replicated
        zeros = [i for i, (_, size) in enumerate(form) if size == 0]
        opened = zeros[0] if zeros else random.randrange(len(form)) if self.chance(0.5) else -1
        items = []
        for i, (name, size) in enumerate(form):
            text = str(size) if name is None else name if i == opened else f"{name}={size}"
            items.append(text + place(bound[i]))
        return f"({' '.join(items)})" + (place(names) if whole and names else "")

    def note(self, grid: Grid, spec: str, shape: Sequence[int]) -> None:
        """Remembers the features of a sharding."""
        self.features |= features_of(grid, spec, tuple(shape))

    def target(self, grid: Grid, shape: Sequence[int], **how: Any) -> str:
        return self.spec(grid, self.forms(shape), **how)

    def accepted(self, grid: Grid, shape: Sequence[int], tries: int = 12, **how: Any) -> str:
        """A spec that DTensor can carry."""
        for _ in range(tries):
            found = self.target(grid, shape, **how)
            if refusal(grid, found, shape) is None:
                return found
        return " ".join(f"d{i}" for i in range(len(shape)))


def features_of(grid: Grid, spec: str, shape: Sequence[int]) -> set[str]:
    dims, pending = read(spec, tuple(shape))
    found: set[str] = set()
    if not shape:
        found.add("scalar")
    for index, dim in enumerate(dims):
        parts = [math.prod(grid.sizes[n] for n in names) for _, _, names in dim]
        if len(dim) > 1 or (dim[0][0] or "").startswith("("):
            found.add("group")
        if len(dim) > 1 and any(p > 1 for p in parts):
            found.add("factor")
            if any(p > 1 and math.prod(s for _, s, _ in dim[:i]) > 1 for i, p in enumerate(parts)):
                found.add("inner factor")
            if math.prod(shape[:index]) > 1:
                found.add("factor behind a dim")
            if any(name is None and p > 1 for (name, _, _), p in zip(dim, parts, strict=True)):
                found.add("split number")
        elif parts[0] > 1:
            if dim[0][0].startswith("("):
                found.add("whole group")
            found.add("even" if shape[index] % parts[0] == 0 else "uneven")
            if shape[index] == 1:
                found.add("size 1 split")
        if math.prod(parts) > 1 and shape[index] == 0:
            found.add("size 0 split")
        split = [n for _, _, names in dim for n in names if grid.sizes[n] > 1]
        if len(split) > 1:
            found.add("nested")
        axes_ = grid.as_axes(split)
        if axes_ and list(axes_) != sorted(axes_, key=grid.axis_names.index):
            found.add("order of axes")
    ops = [op for op, names in pending if any(grid.sizes[n] > 1 for n in names)]
    found |= {f"pending {op}" for op in ops}
    if len(set(ops)) > 1:
        found.add("mixed pending")
    return found


def base() -> int:
    return _base


def same_indices(sharding: axes.Sharding, grid: Grid, spec: str, shape: Sequence[int]) -> None:
    """Whether `local_indices` and `local_shape` say of every rank what it holds."""
    for position, rank in enumerate(grid.ranks):
        expected = grid.pieces(without_pending(spec), tuple(shape), position)
        found = []
        for entry in sharding.local_indices(shape, _base + rank):
            runs = (entry,) if isinstance(entry, slice) else entry
            found.append([i for run in runs for i in range(run.start, run.stop)])
        assert found == expected, f"rank {rank} by '{spec}' of {list(shape)}: {found} for {expected}"
        assert sharding.local_shape(shape, _base + rank) == tuple(map(len, expected))
