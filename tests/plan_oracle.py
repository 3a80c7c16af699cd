"""A plan carried out on every rank by numpy, and what its result must be, by brute force.

What a rank holds is worked out here from the definition alone: coordinates digit by digit, `torch.chunk`
piece by piece, on arrays of indices. Nothing of the planner is used but the plan itself. Values are
random integers in float64, so sums are exact in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from axes.algebra.layout import Layout
from axes.algebra.mesh import Mesh
from axes.algebra.plan import Plan, itemsize_of
from axes.algebra.planning.exchange import Exchange
from axes.algebra.planning.form import aligned
from axes.algebra.planning.step import Step
from axes.algebra.sharding import PendingReduction, ShardedDim, ShardedFactor, Sharding
from axes.algebra.universe import Universe

REDUCE = {"sum": np.add.reduce, "mean": np.mean, "max": np.maximum.reduce, "min": np.minimum.reduce}


class Grouped(NamedTuple):
    """A dim that is a product of factors: their sizes, and the layouts that split each."""

    sizes: tuple[int, ...]
    splits: tuple[tuple[Layout, ...], ...]


Split = tuple[Layout, ...] | Grouped
Pending = tuple[tuple[str, tuple[Layout, ...]], ...]


def lying(
    universe: Universe,
    extent: Layout,
    splits: Sequence[Split],
    pending: Pending = (),
    names: Mapping[str, Layout] | None = None,
) -> Sharding:
    """The sharding with these layouts, on the lines of `extent` of a universe."""
    whole = Mesh(f"all={universe.size}", ranks=universe.ranks)
    mesh = whole._with(axis_names=("all",), namespace={**(names or {}), "all": extent})

    def dim(at: int, split: Split) -> ShardedDim:
        if isinstance(split, Grouped):
            pairs = zip(split.sizes, split.splits, strict=True)
            return ShardedDim(tuple(ShardedFactor(None, size, tuple(map(mesh.called, each))) for size, each in pairs))
        return ShardedDim((ShardedFactor(f"d{at}", None, tuple(map(mesh.called, split))),))

    reductions = tuple(PendingReduction(op, tuple(map(mesh.called, layouts))) for op, layouts in pending)
    return Sharding(mesh, tuple(dim(*each) for each in enumerate(splits)), reductions)


# --- by definition --------------------------------------------------------------------------------


def chunk(indices: np.ndarray, pieces: int, at: int) -> np.ndarray:
    """Piece `at` of `torch.chunk(indices, pieces)`, empty where torch returns fewer pieces."""
    step = -(-len(indices) // pieces)
    return indices[at * step : (at + 1) * step]


def coordinate(layout: Layout, position: int) -> int:
    index = 0
    for size, stride in layout.modes:
        index = index * size + (position // stride) % size
    return index


def held(state: Sharding, shape: tuple[int, ...], position: int) -> list[np.ndarray]:
    """For each dim the indices that the position holds."""
    found = []
    for size, dim in zip(shape, state.dims, strict=True):
        sizes = [factor.size for factor in dim.factors] if len(dim.factors) > 1 else [size]
        pieces = []
        for extent, factor in zip(sizes, dim.factors, strict=True):
            indices = np.arange(extent)
            for layout in factor.layouts:
                indices = chunk(indices, layout.size, coordinate(layout, position))
            pieces.append(indices)
        grid = np.arange(size).reshape(sizes)
        found.append(grid[np.ix_(*pieces)].reshape(-1))
    return found


def positions(state: Sharding) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(state.universe.ranks)}


def pending_layouts(state: Sharding) -> list[tuple[str, Layout]]:
    return [(p.op, axis.layout) for p in state.pending for axis in p.axes if axis.size > 1]


def resolve(values: dict[tuple[int, ...], np.ndarray], pending: list[tuple[str, Layout]]) -> np.ndarray:
    """The value of a tensor from its summands by pending coordinate, innermost reduction first."""
    for op, layout in pending:
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        for coordinates in sorted(values):
            groups.setdefault(coordinates[1:], []).append(values[coordinates])
        assert all(len(group) == layout.size for group in groups.values())
        values = {key: REDUCE[op](np.stack(group), axis=0) for key, group in groups.items()}
    return values[()]


def copy_of(state: Sharding, position: int) -> int:
    """Which of the independent tensors a position is part of: its digits outside the extent."""
    return position - state.mesh.extent.offset(coordinate(state.mesh.extent, position))


class Truth:
    """The tensors that a source state describes: one for each line of its extent."""

    def __init__(self, state: Sharding, shape: tuple[int, ...], seed: int = 0):
        self.shape, self.seed = shape, seed
        self.pending = pending_layouts(state)
        self.values: dict[int, dict[tuple[int, ...], np.ndarray]] = {}
        for position in range(state.universe.size):
            layers = self.values.setdefault(copy_of(state, position), {})
            key = tuple(coordinate(layout, position) for _, layout in self.pending)
            if key not in layers:
                rng = np.random.default_rng((seed, copy_of(state, position), *key))
                layers[key] = np.array(rng.integers(-99, 99, shape) * 60.0)

    def tiles(self, state: Sharding) -> dict[int, np.ndarray]:
        """What each rank holds at the start."""
        found = {}
        for position, rank in enumerate(state.universe.ranks):
            key = tuple(coordinate(layout, position) for _, layout in self.pending)
            whole = self.values[copy_of(state, position)][key]
            found[rank] = whole[np.ix_(*held(state, self.shape, position))]
        return found

    def check(self, source: Sharding, target: Sharding, tiles: dict[int, np.ndarray]) -> None:
        """Every rank of the target holds its part; what is still pending resolves to the truth."""
        pending = pending_layouts(target)
        groups: dict[tuple[object, ...], dict[tuple[int, ...], np.ndarray]] = {}
        for position, rank in enumerate(target.universe.ranks):
            at = copy_of(source, position) if source.universe == target.universe else 0
            parts = tuple(tuple(indices) for indices in held(target, self.shape, position))
            # Positions that differ in pending digits alone hold summands of one and the same part.
            base = position - sum(layout.offset(coordinate(layout, position)) for _, layout in pending)
            key = tuple(coordinate(layout, position) for _, layout in pending)
            groups.setdefault((at, parts, base), {})[key] = tiles[rank]
        for (at, parts, _), values in groups.items():
            whole = resolve(dict(self.values[at]), self.pending)
            expected = whole[np.ix_(*[np.array(p, dtype=int) for p in parts])]
            np.testing.assert_allclose(resolve(values, pending), expected, rtol=1e-12)


# --- carrying out ---------------------------------------------------------------------------------


def run(plan: Plan, seed: int = 0) -> None:
    """Carry the plan out on every rank, and check its result and what it says about itself."""
    truth = Truth(plan.source, plan.shape, seed)
    tiles = truth.tiles(plan.source)
    state = plan.source
    for step in plan.steps:
        assert step.source.dims == state.dims
        tiles = carry_out(step, tiles, itemsize_of(plan.dtype))
        state = step.target
    check_memory(plan)
    if not plan.steps:
        tiles = {rank: tiles[rank] for rank in plan.target.universe.ranks}
    truth.check(plan.source, plan.target, tiles)


def check_memory(plan: Plan) -> None:
    """No buffer above the larger tile, padding included; no tile in between above the source's."""
    itemsize = itemsize_of(plan.dtype)
    limit = padded_tile(plan) * itemsize
    for step in plan.steps:
        assert max(step.send_bytes, step.receive_bytes) <= limit, (str(plan), limit)
    same = plan.source.universe == plan.target.universe
    source, target = (largest(state, plan.shape) for state in (plan.source, plan.target))
    for step in plan.steps[:-1]:
        assert largest(step.target, plan.shape) <= (source if same else max(source, target)), str(plan)
    assert plan.peak_bytes <= (max(source, target) + source + target) * itemsize + 2 * limit


def sizes_of(state: Sharding, shape: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    found = []
    for size, dim in zip(shape, state.dims, strict=True):
        sizes = [factor.size for factor in dim.factors] if len(dim.factors) > 1 else [size]
        found += [(n, [lay.size for lay in f.layouts]) for n, f in zip(sizes, dim.factors, strict=True)]
    return found


def piece(size: int, splits: list[int]) -> int:
    for n in splits:
        size = -(-size // n)
    return size


def largest(state: Sharding, shape: tuple[int, ...]) -> int:
    return math.prod(piece(size, splits) for size, splits in sizes_of(state, shape))


def padded_tile(plan: Plan) -> int:
    """The larger tile, where each dim counts as what the splits of either state round it up to."""
    pairs = zip(plan.source.dims, plan.target.dims, strict=True)
    sides = zip(*[aligned(one, two) or (one, two) for one, two in pairs], strict=True) if plan.shape else ((), ())
    states = [replace(s, dims=tuple(dims)) for s, dims in zip((plan.source, plan.target), sides, strict=True)]
    both = [sizes_of(state, plan.shape) for state in states]
    if plan.source.universe != plan.target.universe:
        return max(largest(plan.source, plan.shape), largest(plan.target, plan.shape), shared_tile(plan))
    if len(both[0]) != len(both[1]):
        return max(math.prod(piece(*slot) for slot in side) for side in both) * 2
    tiles = [1, 1]
    for slots in zip(*both, strict=True):
        whole = max(piece(size, splits) * math.prod(splits) for size, splits in slots)
        whole = max(whole, *(size for size, _ in slots))
        for side, (_, splits) in enumerate(slots):
            tiles[side] *= -(-whole // math.prod(splits))
    return max(tiles)


def shared_tile(plan: Plan) -> int:
    """The target tile, padded so that its replicas can share it: along the dim that needs least padding."""
    slots = sizes_of(plan.target, plan.shape)
    pieces = math.prod(n for _, splits in slots for n in splits)
    replicas = plan.target.universe.size // pieces
    if not slots:
        return replicas  # a scalar can't be shared: each replica gets it whole
    tiles = [piece(*slot) for slot in slots]
    padded = [piece(size, [*splits, replicas]) * replicas for size, splits in slots]
    return min(math.prod((*tiles[:at], padded[at], *tiles[at + 1 :])) for at in range(len(slots)))


def carry_out(step: Step, tiles: dict[int, np.ndarray], itemsize: int) -> dict[int, np.ndarray]:
    """One step on all ranks: returns the tiles after it, checks counts, coverage, bytes and balance."""
    if step.opened is not step:
        views = {rank: tile.reshape(step.opened.input_shape(rank)) for rank, tile in tiles.items()}
        made = carry_out(step.opened, views, itemsize)
        return {rank: tile.reshape(step.output_shape(rank)) for rank, tile in made.items()}
    ranks = sorted({*step.source.universe.ranks, *step.target.universe.ranks})
    plans: dict[int, Exchange] = {rank: step.exchange(rank) for rank in ranks}
    for rank in ranks:
        shape = step.input_shape(rank)
        assert shape is None or tiles[rank].shape == shape
    if step.kind not in ("slice",):
        assert all(len(plans[rank].ranks) == step.group_size for rank in ranks)
        assert all(rank in plans[rank].ranks for rank in ranks)
    result = globals()[f"_{step.kind}"](step, tiles, plans, itemsize)
    for rank in step.target.universe.ranks:
        assert result[rank].shape == step.output_shape(rank)
        assert not np.isnan(result[rank]).any(), f"{step.kind} leaves holes on rank {rank}"
    return {rank: result[rank] for rank in step.target.universe.ranks}


def _index(region):
    return (*(slice(*bounds) for bounds in region), ...)  # the dots make a view of a scalar, too


def _packed(tile: np.ndarray, regions) -> np.ndarray:
    parts = [tile[_index(region)].reshape(-1) for region in regions]
    return np.concatenate(parts) if parts else np.empty(0)


def _unpack(out: np.ndarray, regions, values: np.ndarray) -> None:
    at = 0
    for region in regions:
        view = out[_index(region)]
        assert np.isnan(view).all(), "a box is written twice"
        view[...] = values[at : at + view.size].reshape(view.shape)
        at += view.size
    assert at == len(values)


def _empty(step: Step, rank: int) -> np.ndarray:
    return np.full(step.output_shape(rank), np.nan)


def _slice(step, tiles, plans, itemsize):
    found = {}
    for rank in step.target.universe.ranks:
        found[rank] = _empty(step, rank)
        for source, target in plans[rank].copies:
            _unpack(found[rank], [target], tiles[rank][_index(source)].reshape(-1))
    assert step.bytes_in == step.bytes_out == 0
    return found


def _reduced(step: Step, values: list[np.ndarray]) -> np.ndarray:
    return np.asarray(REDUCE[step.op](np.stack(values), axis=0) / step.divisor)


def _all_reduce(step, tiles, plans, itemsize):
    return {rank: _reduced(step, [tiles[peer] for peer in plans[rank].ranks]) for rank in plans}


def _reduce_scatter(step, tiles, plans, itemsize):
    rows = {}
    for rank, exchange in plans.items():
        assert [t.peer for t in exchange.sends] == list(range(step.group_size))
        for transfer in exchange.sends:
            row = np.zeros(exchange.padded)
            values = _packed(tiles[rank], transfer.regions)
            row[: len(values)] = values
            assert len(values) == transfer.elements <= exchange.padded
            rows[rank, exchange.ranks[transfer.peer]] = row
        if step.flat:
            flat = np.concatenate([rows[rank, peer] for peer in exchange.ranks])
            np.testing.assert_array_equal(flat, tiles[rank].reshape(-1))
    found = {}
    for rank, exchange in plans.items():
        row = _reduced(step, [rows[peer, rank] for peer in exchange.ranks])
        found[rank] = _empty(step, rank)
        (mine,) = exchange.receives
        _unpack(found[rank], mine.regions, row[: mine.elements])
    assert step.bytes_in == step.bytes_out == (step.group_size - 1) * step.padded * itemsize
    return found


def _all_gather(step, tiles, plans, itemsize):
    found = {}
    for rank, exchange in plans.items():
        found[rank] = _empty(step, rank)
        assert [t.peer for t in exchange.receives] == list(range(step.group_size))
        for transfer in exchange.receives:
            values = tiles[exchange.ranks[transfer.peer]].reshape(-1)
            assert len(values) == transfer.elements <= exchange.padded
            _unpack(found[rank], transfer.regions, values)
        if step.flat:
            parts = [tiles[peer].reshape(-1) for peer in exchange.ranks]
            np.testing.assert_array_equal(np.concatenate(parts), found[rank].reshape(-1))
    assert step.bytes_in == step.bytes_out == (step.group_size - 1) * step.padded * itemsize
    return found


def _messages(step, tiles, plans, itemsize):
    """`(from, to) -> values` of an exchange, with both ends' counts compared."""
    found = {}
    for rank, exchange in plans.items():
        for transfer in exchange.sends:
            values = _packed(tiles[rank], transfer.regions)
            assert len(values) == transfer.elements > 0
            found[rank, exchange.ranks[transfer.peer]] = (transfer.layer, values)
            assert transfer.peer != exchange.ranks.index(rank)
    expected = {
        (exchange.ranks[t.peer], rank): t.elements for rank, exchange in plans.items() for t in exchange.receives
    }
    assert expected == {key: len(values) for key, (_, values) in found.items()}
    check_traffic(step, plans, itemsize)
    return found


def check_traffic(step: Step, plans: dict[int, Exchange], itemsize: int) -> None:
    """What the step says of the busiest rank is exact for even tiles, else a bound; and sends are balanced."""
    received = max(sum(t.elements for t in exchange.receives) for exchange in plans.values()) * itemsize
    sent = max(sum(t.elements for t in exchange.sends) for exchange in plans.values()) * itemsize
    assert received <= step.bytes_in
    assert sent <= step.bytes_out
    if step.source.universe == step.target.universe and is_even(step):
        assert sent <= received == step.bytes_in == step.bytes_out


def is_even(step: Step) -> bool:
    sides = (sizes_of(state, step.shape) for state in (step.source, step.target))
    return all(size % math.prod(splits) == 0 for side in sides for size, splits in side)


def _all_to_all(step, tiles, plans, itemsize):
    messages = _messages(step, tiles, plans, itemsize)
    found = {}
    for rank in step.target.universe.ranks:
        exchange = plans[rank]
        found[rank] = _empty(step, rank)
        for source, target in exchange.copies:
            _unpack(found[rank], [target], tiles[rank][_index(source)].reshape(-1))
        for transfer in exchange.receives:
            _unpack(found[rank], transfer.regions, messages[exchange.ranks[transfer.peer], rank][1])
    return found


def _permute(step, tiles, plans, itemsize):
    for exchange in plans.values():
        assert len(exchange.sends) <= 1
        assert len(exchange.receives) <= 1
    return _all_to_all(step, tiles, plans, itemsize)


def _reduce_move(step, tiles, plans, itemsize):
    messages = _messages(step, tiles, plans, itemsize)
    found = {}
    for rank, exchange in plans.items():
        layers = [_empty(step, rank) for _ in range(exchange.layers)]
        for source, target in exchange.copies:
            _unpack(layers[exchange.layer], [target], tiles[rank][_index(source)].reshape(-1))
        for transfer in exchange.receives:
            _, values = messages[exchange.ranks[transfer.peer], rank]
            _unpack(layers[transfer.layer], transfer.regions, values)
        found[rank] = _reduced(step, layers)
    return found


# --- the states of a small mesh -------------------------------------------------------------------


def all_states(ndim: int, axes: int) -> list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]]:
    """`(axes of each dim in order, pending axes)`: each axis replicated, on a dim in every order, or pending."""
    found = []
    for places in itertools.product(range(-2, ndim), repeat=axes):
        lists = [[axis for axis in range(axes) if places[axis] == dim] for dim in range(ndim)]
        pending = tuple(axis for axis in range(axes) if places[axis] == -1)
        orders = itertools.product(*map(itertools.permutations, lists))
        found.extend((tuple(map(tuple, order)), pending) for order in orders)
    return found
