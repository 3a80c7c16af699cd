"""Recipes run in one process: every rank's local tensor as a numpy array.

A dictionary `{rank: array}` is a sharded tensor. `scatter` makes one from a whole array, `gather`
makes the whole array of one (and checks that replicas agree), `redistribute` turns one sharding into
another by what shardings mean. `run` does what a recipe says on every rank; where that moves data, it
carries out the plan.
"""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Mapping, Sequence

import numpy as np

from axes.algebra.flow import Input, Recipe, unmoved
from axes.algebra.layout import digits
from axes.algebra.plan import plan
from axes.algebra.sharding import ShardedDim, ShardedFactor, Sharding
from tests.plan_oracle import carry_out

Locals = dict[int, np.ndarray]

COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


def indices(sharding: Sharding, shape: Sequence[int], rank: int) -> tuple[np.ndarray, ...]:
    """Per dim the indices of the whole that a rank holds."""
    found = []
    for entry in sharding.local_indices(shape, rank):
        runs = (entry,) if isinstance(entry, slice) else entry
        found.append(np.concatenate([np.arange(run.start, run.stop) for run in runs]))
    return np.ix_(*found) if found else ()


def _pending_digits(shardings: Sequence[Sharding]) -> list[list[tuple[str, tuple[int, int]]]]:
    """Each sharding's pending reductions as `(op, digit)` in order, over common digits."""
    layouts = [a.layout for s in shardings for p in s.pending for a in p.axes]
    refined = iter(digits(*layouts) if layouts else ())
    return [[(p.op, digit) for p in s.pending for _ in p.axes for digit in next(refined)] for s in shardings]


def scatter(whole: np.ndarray, sharding: Sharding, seed: int = 0, ranks: Sequence[int] | None = None) -> Locals:
    """The shards of a whole array; what is pending gets summands (or candidates) at random."""
    random = np.random.default_rng(seed)
    entries = [(op, d) for op, d in _pending_digits([sharding])[0] if op != "same"]
    values = {(): whole}
    for op, (size, _) in reversed(entries):
        values = {
            (piece, *key): value
            for key, total in values.items()
            for piece, value in enumerate(_pieces(op, size, total, random))
        }
    found = {}
    for rank in sharding.mesh.universe.ranks if ranks is None else ranks:
        position = sharding.mesh.universe.position(rank)
        key = tuple(position // stride % size for _, (size, stride) in entries)
        found[rank] = values[key][indices(sharding, whole.shape, rank)]
    return found


def _pieces(op: str, count: int, total: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    noise = [random.integers(0, 5, total.shape).astype(total.dtype) for _ in range(count)]
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        chosen = random.integers(0, count)
        return [total + sign * n * (i != chosen) for i, n in enumerate(noise)]
    last = total * (count if op == "mean" else 1) - sum(noise[1:], np.zeros_like(total))
    return [last, *noise[1:]]


def gather(parts: Locals, sharding: Sharding, shape: Sequence[int]) -> np.ndarray:
    """The whole array, pending reductions done; replicas must agree."""
    unsplit = tuple(ShardedDim((ShardedFactor("_"),)) for _ in sharding.dims)
    return redistribute(parts, sharding, Sharding(sharding.mesh, unsplit), shape)[sharding.mesh.universe.ranks[0]]


def redistribute(parts: Locals, source: Sharding, target: Sharding, shape: Sequence[int]) -> Locals:
    """The same value in another sharding. `same` is a replica here: it is about gradients."""
    universe = source.mesh.universe
    have, want = _pending_digits([source, target])
    have = [entry for entry in have if entry[0] != "same"]
    kept = [entry for entry in want if entry[0] != "same"]
    assert set(kept) <= set(have), f"{target} keeps pending what {source} doesn't have"
    resolved = [entry for entry in have if entry not in kept]

    def key(rank: int, entries: list[tuple[str, tuple[int, int]]]) -> tuple[int, ...]:
        position = universe.position(rank)
        return tuple(position // stride % size for _, (size, stride) in entries)

    pieces: dict[tuple[int, ...], dict[tuple[int, ...], np.ndarray]] = {}
    dtype = next(iter(parts.values())).dtype
    for rank in universe.ranks:
        slots = pieces.setdefault(key(rank, kept), {})
        whole = slots.setdefault(key(rank, resolved), np.full(shape, np.nan, dtype))
        at = indices(source, shape, rank)
        assert parts[rank].shape == whole[at].shape, (
            f"rank {rank} holds {parts[rank].shape}, not {whole[at].shape}, of {source}"
        )
        known = ~np.isnan(whole[at])
        assert np.allclose(whole[at][known], parts[rank][known]), f"replicas of {source} differ"
        whole[at] = parts[rank]
    values = {k: _resolve(slots, resolved) for k, slots in pieces.items()}
    return {rank: values[key(rank, kept)][indices(target, shape, rank)] for rank in universe.ranks}


def _resolve(slots: Mapping[tuple[int, ...], np.ndarray], entries: list[tuple[str, tuple[int, int]]]) -> np.ndarray:
    """All reductions done, the first entry first."""
    for op, (size, _) in entries:
        merged = {}
        for rest in {k[1:] for k in slots}:
            value = functools.reduce(COMBINE[op], [slots[(i, *rest)] for i in range(size)])
            merged[rest] = value / size if op == "mean" else value
        slots = merged
    (value,) = slots.values()
    assert not np.isnan(value).any(), "a part of the whole is on no rank"
    return value


def run(recipe: Recipe, operands: Sequence[Locals]) -> Locals:
    """What the recipe says, on every rank; checks the promised local shapes."""
    prepared = [_prepared(recipe, i, parts) for i, parts in zip(recipe.inputs, operands, strict=True)]
    result, shape = recipe.result, recipe.shape_of(recipe.result.atoms)
    derived = {
        rank: _local(recipe, [p[rank] for p in prepared], result.derived.local_shape(shape, rank))
        for rank in recipe.mesh.universe.ranks
    }
    for rank, value in derived.items():
        assert value.shape == result.derived.local_shape(shape, rank)
    found = _moved(derived, result.derived, result.target, shape)
    merged = {rank: value.reshape(result.closed.local_shape(result.shape, rank)) for rank, value in found.items()}
    return _moved(merged, result.closed, result.output, result.shape)


def _moved(parts: Locals, source: Sharding, target: Sharding, shape: Sequence[int]) -> Locals:
    if unmoved(source, target, tuple(shape)):
        return parts
    for step in plan(source, target, shape, "float64").steps:
        parts = carry_out(step, parts, 8)
    return parts


def _prepared(recipe: Recipe, operand: Input, parts: Locals) -> Locals:
    shape = recipe.shape_of(operand.atoms)
    opened = _moved(parts, operand.source, operand.opened, operand.shape)
    found = {rank: value.reshape(operand.elementary.local_shape(shape, rank)) for rank, value in opened.items()}
    return _moved(found, operand.elementary, operand.prepared, shape)


def _local(recipe: Recipe, operands: list[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """The local computation on arrays with one dim per atom."""
    letters = dict(zip(recipe.size, string.ascii_letters, strict=False))
    inputs = [[letters[a] for a in i.atoms] for i in recipe.inputs]
    there = {letter for letters_ in inputs for letter in letters_}
    atoms = recipe.result.atoms
    kept = [letters[a] for a in dict.fromkeys(atoms) if letters[a] in there]
    if recipe.op in ("max", "min", "prod"):
        (only,), (value,) = inputs, operands
        gone = tuple(i for i, letter in enumerate(only) if letter not in kept)
        start = {"max": -np.inf, "min": np.inf, "prod": 1}[recipe.op]
        value = getattr(np, recipe.op)(value, axis=gone, initial=start)
        value = np.einsum(f"{''.join(x for x in only if x in kept)}->{''.join(kept)}", value)
    else:
        value = np.einsum(f"{','.join(map(''.join, inputs))}->{''.join(kept)}", *operands)
        value = value * recipe.multiplier / recipe.divisor
    full = np.zeros(shape, value.dtype)
    grid = np.indices(shape)
    at = {letters[atom]: grid[i] for i, atom in enumerate(atoms)}
    diagonal = np.ones(shape, bool)
    for i, j in itertools.combinations(range(len(atoms)), 2):
        if atoms[i] == atoms[j]:
            diagonal &= grid[i] == grid[j]
    if value.ndim and math.prod(shape):
        full[diagonal] = value[tuple(at[letter] for letter in kept)][diagonal]
    elif math.prod(shape):
        full[diagonal] = value
    return full
