"""What expressions mean, against einops on the whole: thousands of cases, every rank simulated."""

from __future__ import annotations

import random as stdlib_random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from axes.algebra.errors import AxesError, ShardingError, SizeError
from axes.algebra.flow import Recipe, gradient, recipe
from axes.algebra.flow.reading import Reading, read
from axes.algebra.flow.recipe import Shape
from axes.algebra.flow.rules import recipe_at
from axes.algebra.flow.scaling import standing_for
from axes.algebra.layout import NamedLayout
from axes.algebra.mesh import Mesh
from axes.algebra.placements import check_torch_can
from axes.algebra.sharding import PendingReduction, ShardedDim, ShardedFactor, Sharding
from tests.flow_cases import Case, Random, case
from tests.flow_oracle import gather, indices, run, scatter
from tests.strategies import regrouped

Shardings = tuple[Sharding | None, ...]
Given = tuple[tuple[str, int], ...]

REFUSED = (
    "DTensor can't",
    "which DTensor on",
    "uneven parts inside",
    "doesn't divide into",
    "a mean over uneven shards",
    "that don't fall on its names",
)
"""What a generated expression may be refused for: all else that it says is right."""

EXAMPLES = settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))


def close(found: np.ndarray, expected: np.ndarray, message: str) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-9, err_msg=message)


def recipe_of(found: Case) -> Recipe | None:
    try:
        for sharding, shape in zip(found.shardings, found.shapes, strict=True):
            check_torch_can(sharding, shape)
        return recipe(
            found.kind, found.text, found.op, found.shardings, found.shapes, found.mesh, tuple(found.given.items())
        )
    except ShardingError as error:
        if any(text in str(error) for text in REFUSED):
            return None
        raise AssertionError(f"{found}\n{error}") from error


def operands_of(found: Case) -> list[dict[int, np.ndarray]]:
    pairs = zip(found.wholes, found.shardings, strict=True)
    return [scatter(whole.numpy(), sharding, found.seed + i) for i, (whole, sharding) in enumerate(pairs)]


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_every_expression_is_einops_on_the_whole_in_the_promised_sharding(random: Random):
    found = case(random)
    made = recipe_of(found)
    if made is None:
        return
    result = made.result
    expected = found.expected().numpy()
    assert result.shape == expected.shape, (found, made)
    parts = run(made, operands_of(found))
    close(gather(parts, result.output, result.shape), expected, message=f"{found}\n{made}")
    for rank, part in parts.items():
        assert part.shape == result.output.local_shape(result.shape, rank)


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_the_gradient_recipe_is_the_gradient_on_the_whole_however_the_cotangent_arrives(random: Random):
    found = case(random)
    if found.op in ("max", "min"):
        return
    made = recipe_of(found)
    if made is None:
        return
    wholes = [whole.clone().requires_grad_() for whole in found.wholes]
    value = found.expected(wholes)
    numbers = np.random.default_rng(found.seed)
    cotangent = numbers.integers(-3, 4, tuple(value.shape)).astype(np.float64)
    index = random.randrange(len(wholes))
    (expected,) = torch.autograd.grad(value, wholes[index], torch.from_numpy(cotangent), materialize_grads=True)
    arrived = any_sharding(random, made)
    back = gradient(made, index, arrived)
    operands = operands_of(found)
    others = [parts for at, parts in enumerate(operands) if at != index]
    parts = run(back, [scatter(cotangent, arrived, found.seed), *others])
    result = back.result
    message = f"{found}\narrived {arrived}\n{made}\n{back}"
    close(gather(parts, result.output, result.shape), expected.numpy(), message=message)
    check_is_a_gradient_of(made.inputs[index].source, result.output, result.shape, message)


def check_is_a_gradient_of(operand: Sharding, found: Sharding, shape: tuple[int, ...], message: str) -> None:
    """Split where the operand is (or further), not pending where it was, anything elsewhere."""
    for rank in operand.mesh.universe.ranks:
        pairs = zip(indices(operand, shape, rank), indices(found, shape, rank), strict=True)
        assert all({*theirs.flat} <= {*mine.flat} for mine, theirs in pairs), message
    reduced = {axis for p in operand.pending for axis in p.axes}
    assert not reduced & {axis for p in found.pending for axis in p.axes}, message
    assert not reduced & {axis for dim in found.dims for axis in dim.axes}, message


def any_sharding(random: Random, made: Recipe) -> Sharding:
    """Some sharding of the result that DTensor can express: its own, or one drawn."""
    result, mesh = made.result, made.mesh
    if random.random() < 0.3 and all(p.op in ("sum", "mean") for p in result.output.pending):
        return result.output
    axes = random.sample(mesh.named(mesh.axis_names), mesh.ndim)
    splits: list[list[NamedLayout]] = [[] for _ in result.shape]
    pending: list[PendingReduction] = []
    for axis in axes:
        choice = random.randint(0, len(splits) + 1)
        if choice < len(splits):
            splits[choice].append(axis)
        elif choice == len(splits):
            pending.append(PendingReduction(random.choice(["sum", "mean"]), (axis,)))
    found = Sharding(mesh, tuple(ShardedDim((ShardedFactor("_", None, tuple(s)),)) for s in splits), tuple(pending))
    try:
        check_torch_can(found, result.shape)
    except ShardingError:
        return Sharding(mesh, tuple(ShardedDim((ShardedFactor("_"),)) for _ in splits), tuple(pending))
    return found


@settings(parent=EXAMPLES, max_examples=300)
@given(st.randoms(use_true_random=False))
def test_the_gradient_of_a_gradient_is_derived_like_any_other(random: Random):
    found = case(random, kind="einsum")
    made = recipe_of(found)
    if made is None:
        return
    index = random.randrange(len(found.wholes))
    once = gradient(made, index, any_sharding(random, made))
    # The gradient recipe's operands are the cotangent and the others; take the gradient to one.
    which = random.randrange(len(once.inputs))
    twice = gradient(once, which, any_sharding(random, once))
    others = [found.wholes[at] for at in range(len(found.wholes)) if at != index]
    numbers = np.random.default_rng(found.seed)
    cotangent = torch.from_numpy(numbers.integers(-3, 4, made.result.shape).astype(np.float64))
    second = torch.from_numpy(numbers.integers(-3, 4, once.result.shape).astype(np.float64))
    leaves = [t.clone().requires_grad_() for t in (cotangent, *others)]
    wholes = [*leaves[1:]]
    wholes.insert(index, found.wholes[index].clone().requires_grad_())
    (first,) = torch.autograd.grad(
        found.expected(wholes), wholes[index], leaves[0], create_graph=True, materialize_grads=True
    )
    if not first.requires_grad:
        return
    (expected,) = torch.autograd.grad(first, leaves[which], second, materialize_grads=True)
    inputs = [leaf.detach() for leaf in leaves]
    feeds = [
        scatter(t.numpy(), i.source, found.seed + at) for at, (t, i) in enumerate(zip(inputs, once.inputs, strict=True))
    ]
    del feeds[which]
    parts = run(twice, [scatter(second.numpy(), twice.inputs[0].source, found.seed), *feeds])
    close(gather(parts, twice.result.output, twice.result.shape), expected.numpy(), message=f"{found}\n{once}\n{twice}")


@settings(parent=EXAMPLES, max_examples=300)
@given(st.randoms(use_true_random=False))
def test_a_plain_shard_means_what_the_declared_dtensor_means(random: Random):
    """The same steps on every rank, and the promised shards, where all is declared."""
    found = case(random, everything_explicit=True)
    specs = [s.spec for s in found.shardings]
    text = found.text
    for spec in specs:
        if "|" in spec and spec.split("|")[1] not in text:
            return  # something pending that the text doesn't declare
    made = recipe_of(found)
    plain: Recipe | None = None
    for rank in found.mesh.universe.ranks:
        shapes = tuple(s.local_shape(shape, rank) for s, shape in zip(found.shardings, found.shapes, strict=True))
        sizes = tuple(found.given.items())
        try:
            plain = recipe(found.kind, text, found.op, (None,) * len(shapes), shapes, found.mesh.at(rank), sizes)
        except ShardingError as error:
            if made is None and any(reason in str(error) for reason in REFUSED):
                return
            raise
        made = made or plain
        for (_, to, shape), (_, other, whole) in zip(plain.moves, made.moves, strict=True):
            assert shape == whole
            assert to.is_equivalent(other, shape)
        assert plain.result.output.is_equivalent(made.result.output, made.result.shape)
        assert plain.result.shape == made.result.shape
    assert plain is not None
    parts, result = run(plain, operands_of(found)), plain.result
    close(gather(parts, result.output, result.shape), found.expected().numpy(), message=f"{found}\n{plain}")
    for rank, part in parts.items():
        assert part.shape == result.output.local_shape(result.shape, rank)


@settings(parent=EXAMPLES, max_examples=150)
@given(regrouped())
def test_axes_that_are_flattened_behind_others_are_rearranged_as_they_are_written(drawn: tuple[Mesh, str, str, int]):
    """In both views; DTensor can't have some of it."""
    mesh, one, two, extent = drawn
    assume(extent)  # text has no 0
    source, text, sizes = mesh.sharding(one), f"{one} -> {two}", (("s", extent),)
    rank = mesh.universe.ranks[-1]
    made = [recipe("rearrange", text, "", (None,), (source.local_shape((extent,), rank),), mesh.at(rank), sizes)]
    try:
        check_torch_can(source, (extent,))
        made.append(recipe("rearrange", text, "", (source,), ((extent,),), mesh, sizes))
    except ShardingError as error:
        assert "DTensor" in str(error)  # noqa: PT017 - it may also be accepted
    whole = np.arange(1.0, extent + 1)
    wanted = scatter(whole, mesh.sharding(two))
    for each in made:
        for at, part in run(each, [scatter(whole, source)]).items():
            np.testing.assert_array_equal(part, wanted[at], err_msg=f"{drawn}\n{each}")


def outcome(make: Callable[..., Recipe], *args: Any) -> tuple[object, ...]:
    """What a recipe is, whole and in print; or the error."""
    try:
        found = make(*args)
    except AxesError as error:
        return type(error), str(error)
    return found, str(found), [str(each) for each in (found.result.derived, found.result.output)], found.counted


def other_sizes(random: Random) -> Iterator[tuple[Case, Reading, Mesh, Shardings, tuple[Shape, ...], Given]]:
    """A drawn expression for several sizes of the names that are dims by themselves, right ones and wrong ones."""
    found = case(random, random.choice((None, "reduce")))
    reading = read(found.kind, found.text, tuple(map(len, found.shapes)))
    loose = {atom for _, _, atom in reading.alone}
    ranks = found.mesh.size
    mesh = found.mesh.at(random.choice(found.mesh.universe.ranks))
    for _ in range(4):
        times = {atom: random.choice((0, 1, 3, ranks, ranks, 2 * ranks, 5 * ranks)) for atom in loose}
        shapes = [list(shape) for shape in found.shapes]
        for operand, dim, atom in reading.alone:
            shapes[operand][dim] *= times[atom] if random.random() < 0.97 else 2
        whole = tuple(map(tuple, shapes))
        given = {name: size for name, size in found.given.items() if name not in loose}
        if random.random() < 0.1:
            given = {**found.given, **{atom: found.sizes[atom] * times[atom] for atom in loose}}
        if random.random() < 0.5:
            shardings = tuple(s.sized(shape) for s, shape in zip(found.shardings, whole, strict=True))
            yield found, reading, found.mesh, shardings, whole, tuple(given.items())
        else:
            local = tuple(s.local_shape(shape, mesh.rank) for s, shape in zip(found.shardings, whole, strict=True))
            yield found, reading, mesh, (None,) * len(local), local, tuple(given.items())


@settings(parent=EXAMPLES, max_examples=300)
@given(st.randoms(use_true_random=False))
def test_a_recipe_of_other_sizes_is_the_one_that_is_found_for_them(random: Random):
    """Sizes on which nothing depends are filled in."""
    for found, reading, mesh, shardings, shapes, sizes in other_sizes(random):
        told = outcome(recipe, found.kind, found.text, found.op, shardings, shapes, mesh, sizes)
        assert told == outcome(recipe_at, reading, mesh, shardings, shapes, sizes, found.op), found


def test_a_dim_with_factors_contradicts_the_other_operand_at_every_size():
    mesh = Mesh("dp=2 tp=2")
    shardings = mesh.sharding("a@tp e"), mesh.sharding("(a@tp i=2) f")
    for rows in (4, 8, 12):  # 8 stands for all sizes that four ranks divide
        with pytest.raises(SizeError, match=f"'a' is 16, found {rows}"):
            recipe("einsum", "a e, a f -> a e f", "sum", shardings, ((16, 5), (rows, 3)), mesh)


def test_most_generated_sizes_are_filled_in():
    random = stdlib_random.Random(0)
    drawn = [each for _ in range(100) for each in other_sizes(random) if each[1].alone]
    scaled = [standing_for(*each[1:5], dict(each[5]))[1] for each in drawn]
    assert sum(map(bool, scaled)) > len(drawn) / 2


def test_most_generated_expressions_are_accepted():
    random = stdlib_random.Random(0)
    refused = sum(recipe_of(case(random)) is None for _ in range(500))
    assert refused < 100
