"""Expressions worked through: fifty-four that decide what the notation means, each as it stands.

Mesh `dp=2 cp=2 tp=2`, alias `cptp = cp tp`. A row says what an expression does to DTensors with the
shardings given (D), to plain tensors (L), or to both: the spec of the result and the collectives, or
the error. Where a row gives both, the plain tensors are the shards of the DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, ShardingError
from axes.algebra.flow import Recipe, recipe
from axes.algebra.flow.recipe import op_name
from axes.algebra.mesh import Mesh
from axes.algebra.plan import plan
from axes.algebra.sharding import Sharding
from axes.ops.einops_ops import rearrange, reduce, repeat
from axes.ops.einsum import einsum

MESH = Mesh("dp=2 cp=2 tp=2", "cptp = cp tp")
SHAPE = (8, 16, 32)
KINDS = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute", "reduce_move"}


@dataclass(frozen=True)
class Row:
    """One line of the table. `specs` and `shapes` are of the whole operands."""

    number: int | str
    text: str
    specs: Sequence[str]
    shapes: Sequence[tuple[int, ...]] = (SHAPE,)
    kind: str = "rearrange"
    op: object = "sum"
    result: str | None = None
    collectives: Sequence[str] = ()
    error: str | None = None
    views: str = "DL"
    sizes: Sequence[tuple[str, int]] = ()
    mesh: Mesh = MESH


def row(number: int | str, text: str, *specs: str, **fields: object) -> Row:
    return Row(number, text, specs, **fields)  # type: ignore[arg-type]


def einsum_row(number: int | str, text: str, *specs: str, **fields: object) -> Row:
    sizes = {"b": 8, "s": 16, "d": 32, "f": 64, "c": 4, "i": 6, "j": 6}
    names = [[word.split("@")[0] for word in spec.split("|")[0].split()] for spec in text.split("->")[0].split(",")]
    shapes = [tuple(sizes[name] for name in each) for each in names]
    return Row(number, text, specs, shapes, "einsum", **fields)  # type: ignore[arg-type]


ONE_CP = Mesh("dp=4 cp=1 tp=2")

TABLE = [
    row(1, "b s@tp d -> b s d", "b@dp s@tp d", result="b@dp s d", collectives=["all_gather tp"], views="D"),
    row(1, "b s@tp d -> b s d", "b s@tp d", result="b s d", collectives=["all_gather tp"]),
    row(2, "b s@tp d -> b s d", "b s@tp d | sum@dp", result="b s d | sum@dp", collectives=["all_gather tp"], views="D"),
    row(3, "b s@tp d -> b s d", "b s@(cp tp) d", error="says  b s@tp d\n  has   b s@\\(cp tp\\) d", views="D"),
    row(4, "b s d -> b s@tp d", "b s d@tp", error="'tp' would split 's' and 'd'.*write 'd@tp' on the left", views="D"),
    row(5, "b s d -> b s@tp d", "b s d | sum@tp", error="says  b s d\n  has   b s d | sum@tp", views="D"),
    row(6, "b s@cp d -> b s@(cp tp) d", "b s@cp d", result="b s@(cp tp) d"),
    row(7, "b s@(cp tp) d -> b s@cp d", "b s@(cp tp) d", result="b s@cp d", collectives=["all_gather tp"]),
    row(8, "b s@(cp tp) d -> b s@tp d", "b s@(cp tp) d", result="b s@tp d", collectives=["all_to_all cptp"]),
    row(9, "b s@(cp tp) h -> b s@cp h@tp", "b s@(cp tp) h", result="b s@cp h@tp", collectives=["all_to_all tp"]),
    row(10, "b s@(cp tp) h -> b s@tp h@cp", "b s@(cp tp) h", result="b s@tp h@cp", collectives=["all_to_all cptp"]),
    row(11, "b s@(cp tp) d -> b s@(tp cp) d", "b s@(cp tp) d", result="b s@(tp cp) d", collectives=["permute cptp"]),
    row(12, "b s@cptp d -> b s d@tp", "b s@(cp tp) d", result="b s d@tp", collectives=["all_to_all cptp"]),
    row(
        13,
        "b d | sum@cptp -> b d | sum@cp",
        "b d | sum@cptp",
        shapes=[(8, 32)],
        result="b d | sum@cp",
        collectives=["all_reduce tp"],
    ),
    row(
        14,
        "b s@cp (h d) -> b s h@cp d",
        "b s@cp (h@tp d)",
        sizes=[("h", 8)],
        error="says  b s@cp \\(h d\\)\n  has   b s@cp \\(h@tp d\\)",
        views="D",
    ),
    row(
        15,
        "b s@cp (h d) -> b s h@(* cp) d",
        "b s@cp (h@tp d)",
        sizes=[("h", 8)],
        result="b s h@(tp cp) d",
        collectives=["all_to_all cp"],
        views="D",
    ),
    row(
        15,
        "b s@cp (h d) -> b s h@(* cp) d",
        "b s@cp (h d)",
        sizes=[("h", 8)],
        result="b s h@cp d",
        collectives=["all_to_all cp"],
    ),
    row(
        16,
        "(b s)@tp d -> b s d",
        "bs@tp d",
        shapes=[(12, 32)],
        sizes=[("b", 4)],
        result="b s d",
        collectives=["all_gather tp"],
    ),
    row(
        16,
        "(b s)@tp d -> b s d",
        "bs@tp d",
        shapes=[(12, 32)],
        sizes=[("b", 3)],
        result="b s d",
        collectives=["all_gather tp"],
    ),
    row(17, "(b s)@tp d -> b@tp s d", "bs@tp d", shapes=[(12, 32)], sizes=[("b", 4)], result="b@tp s d"),
    row(
        18,
        "(b@tp s) d -> b s d",
        "bs@tp d",
        shapes=[(12, 32)],
        sizes=[("b", 4)],
        result="b s d",
        collectives=["all_gather tp"],
    ),
    row(19, "(h@tp d)@dp e -> h d e", "(h d) e", shapes=[(32, 4)], error="'@' inside or outside, not both"),
    row(20, "b (s p) -> b s p", "b sp@tp", shapes=[(8, 12)], sizes=[("s", 4)], result="b s@tp p", views="D"),
    row(
        20,
        "b (s p) -> b s p",
        "b sp@tp",
        shapes=[(8, 12)],
        sizes=[("s", 3)],
        error="don't fall on its names: \\(s=3 p=4\\)",
        views="D",
    ),
    row(21, "b s (h@(tp cp) d) -> b s h@(tp cp) d", "b s (h@(tp cp) d)", sizes=[("h", 8)], result="b s h@(tp cp) d"),
    row(21, "b s (h (k d)) -> b s h k d", "b s hd", sizes=[("h", 8)], error="groups don't nest"),
    row(22, "b s@cp d -> b d", "b s@cp d", kind="reduce", result="b d", collectives=["all_reduce cp"]),
    row(
        23,
        "b s d -> b d",
        "b s@cp d",
        kind="reduce",
        error="left pending: sum@cp.*write 's@cp' on the left.*'| \\*' on the right",
        views="D",
    ),
    row(24, "b s d -> b d", "b s d", kind="reduce", result="b d"),
    row(25, "b s@cp d -> b d | mean@cp", "b s@cp d", kind="reduce", op="mean", result="b d | mean@cp", views="D"),
    row(
        25,
        "b s@cp d -> b d | mean@cp",
        "b s@cp d",
        sizes=[("s", SHAPE[1])],
        kind="reduce",
        op="mean",
        result="b d | mean@cp",
    ),
    *[
        row(
            25,
            f"b s@cp d -> b d | {pending}",
            "b s@cp d",
            kind="reduce",
            op="mean",
            error="stays pending needs the whole size of 's'.*give it as a keyword: s=",
            views="L",
        )
        for pending in ("mean@cp", "sum@cp", "*")
    ],
    row(
        26,
        "b s@cp d -> b d | mean@cp",
        "b s@cp d",
        shapes=[(8, 5, 32)],
        sizes=[("s", 5)],
        kind="reduce",
        op="mean",
        error="write '| sum@cp' on the right",
    ),
    row(
        26,
        "b s@cp d -> b d | sum@cp",
        "b s@cp d",
        shapes=[(8, 5, 32)],
        sizes=[("s", 5)],
        kind="reduce",
        op="mean",
        result="b d | sum@cp",
    ),
    row(
        27, "b s d | sum@tp -> b s", "b s d | sum@tp", kind="reduce", op="max", error="'max' doesn't pass a pending sum"
    ),
    row(
        28,
        "b s@cp -> b",
        "b s@cp",
        shapes=[(8, 1)],
        sizes=[("s", 1)],
        kind="reduce",
        op="max",
        result="b",
        collectives=["all_reduce cp"],
    ),
    row(
        29,
        "b s@cp -> b",
        "b s@cp",
        shapes=[(8, 16)],
        kind="reduce",
        op=max,
        error=r"'max\(\)' doesn't reduce across ranks",
    ),
    row(30, "b (h 2) -> b h", "b h2", shapes=[(8, 6)], kind="reduce", op="mean", result="b h"),
    row(31, "b d -> b n@tp d", "b d", shapes=[(8, 32)], sizes=[("n", 4)], kind="repeat", result="b n@tp d"),
    einsum_row(32, "b s d, d f@tp -> b s f@tp", "b s d", "d f@tp", result="b s f@tp"),
    einsum_row(32, "b s d, d f@tp -> b s f@tp", "b@dp s@cp d", "d f@tp", result="b@dp s@cp f@tp", views="D"),
    einsum_row(
        33, "b s f@tp, f@tp d -> b s@tp d", "b s f@tp", "f@tp d", result="b s@tp d", collectives=["reduce_scatter tp"]
    ),
    einsum_row(
        34,
        "b s f@tp, f d -> b s d",
        "b s f@tp",
        "f d",
        error="disagree on 'f': 'f@tp' and 'f'.*axes.reshard operand 2 to 'f@tp d'",
    ),
    einsum_row(35, "b s d, d f@tp -> b s f", "b s d", "d f@tp", result="b s f", collectives=["all_gather tp"]),
    einsum_row(
        36,
        "b s f, f d -> b s d",
        "b s f@tp",
        "f@tp d",
        error="left pending: sum@tp.*'f@tp' on the left.*'| \\*' on the right",
        views="D",
    ),
    einsum_row(37, "b s f, f d -> b s d | *", "b s f@tp", "f@tp d", result="b s d | sum@tp", views="D"),
    einsum_row(
        38,
        "b f@tp, f@tp d, c -> b d c",
        "b f@tp",
        "f@tp d",
        "c@tp",
        error="'tp' is wanted by 'f' and by 'c'",
        views="D",
    ),
    einsum_row(39, "b d | sum@tp, d f -> b f | sum@tp", "b d | sum@tp", "d f", result="b f | sum@tp"),
    einsum_row(
        40,
        "b d | sum@tp, d f | sum@tp -> b f",
        "b d | sum@tp",
        "d f | sum@tp",
        error="operands 1 and 2 are both pending over 'tp'",
    ),
    einsum_row(
        41, "b f@tp, f d | sum@tp -> b d", "b f@tp", "f d | sum@tp", error="'tp' splits 'f' and is pending in operand 2"
    ),
    einsum_row(42, "i@tp i -> i@tp", "i@tp j", error="a diagonal needs 'i' unsplit"),
    einsum_row(
        43, "b d | sum@tp, b d | mean@tp -> b d", "b d | sum@tp", "b d | mean@tp", error="both pending over 'tp'"
    ),
    einsum_row(
        "47a",
        "b s f@*, f@* d -> b s d",
        "b s f@tp",
        "f@tp d",
        result="b s d",
        collectives=["all_reduce tp"],
        views="D",
    ),
    einsum_row("47a", "b s f@*, f@* d -> b s d", "b@dp s f", "f d", result="b@dp s d", views="D"),
    einsum_row("47a", "b s f@*, f@* d -> b s d", "b s f@tp", "f@tp d", error="doesn't say what splits 'f'", views="L"),
    einsum_row("47a", "b s f@*, f@* d -> b s d", "b s f@tp", "f d", error="disagree on 'f': 'f@tp' and 'f'", views="D"),
    einsum_row(
        "47b",
        "b s f@*, f@* d -> b s@(* tp) d",
        "b s@cp f@tp",
        "f@tp d",
        result="b s@(cp tp) d",
        collectives=["reduce_scatter tp"],
        views="D",
    ),
    row(
        "47c",
        "b s h@* -> b s",
        "b@dp s h@tp",
        kind="reduce",
        op="mean",
        shapes=[(8, 16, 5)],
        result="b@dp s",
        collectives=["all_reduce tp"],
        views="D",
    ),
    row("47c", "b@* s h@* -> b", "b@dp s@cp h@tp", kind="reduce", error="left pending: sum@cp", views="D"),
    row(44, "... d@tp -> ... d", "b@dp s d@tp", result="b@dp s d", collectives=["all_gather tp"], views="D"),
    row(44, "... d@tp -> ... d", "b s d@tp", result="b s d", collectives=["all_gather tp"]),
    row(49, "b@cp s@cp -> b s", "b s", shapes=[(8, 16)], error="'cp' is used twice"),
    row(49, "b@cp s@cp -> b s", "b s", shapes=[(8, 16)], error="'cp' is used twice", mesh=ONE_CP),
    row(50, "b s@cp d -> b s d", "b s d", result="b s d", mesh=ONE_CP),
]


def solved(line: Row, view: str) -> Recipe:
    wholes = [line.mesh.sharding(spec, **_sizes_of(spec, line.sizes)) for spec in line.specs]
    if view == "D":
        return recipe(
            line.kind, line.text, op_name(line.op), tuple(wholes), tuple(line.shapes), line.mesh, tuple(line.sizes)
        )
    shapes = tuple(whole.local_shape(shape) for whole, shape in zip(wholes, line.shapes, strict=True))
    return recipe(line.kind, line.text, op_name(line.op), (None,) * len(shapes), shapes, line.mesh, tuple(line.sizes))


def _sizes_of(spec: str, sizes: Sequence[tuple[str, int]]) -> dict[str, int]:
    return {name: size for name, size in sizes if f"({name}" in spec}


def collectives(found: Recipe) -> list[str]:
    """What the recipe communicates, in order."""
    steps = []
    for source, target, shape in found.moves:
        made = plan(unmarked(source), unmarked(target), shape, "float32")
        steps += [f"{step.kind} {' '.join(step.axes)}" for step in made.steps if step.kind in KINDS]
    return steps


def unmarked(sharding: Sharding) -> Sharding:
    """Without `same`, which is about gradients alone."""
    return replace(sharding, pending=tuple(p for p in sharding.pending if p.op != "same"))


CASES = [pytest.param(line, view, id=f"{line.number}{view}-{line.text}") for line in TABLE for view in line.views]


@pytest.mark.parametrize(("line", "view"), CASES)
def test_the_table_of_expressions_holds(line: Row, view: str):
    if line.error is not None:
        with pytest.raises(AxesError) as caught:
            solved(line, view)
        assert caught.match(f"(?s){line.error}")
        return
    found = solved(line, view)
    assert line.result is not None
    result = found.result
    assert result.output.is_equivalent(line.mesh.sharding(line.result), result.shape), found
    assert collectives(found) == list(line.collectives), found


@pytest.fixture
def world() -> Iterator[dict[int, Mesh]]:
    """A simulated job: the mesh of the table, and the one whose cp has size one."""
    with axes.simulate(8):
        usual = axes.init_mesh("dp=2 cp=2 tp=2", "cptp = cp tp", device_type="cpu")
        yield {2: usual, 1: axes.init_mesh("dp=4 cp=1 tp=2", device_type="cpu")}


def tensor(mesh: Mesh, sharding: Sharding, shape: tuple[int, ...], view: str) -> torch.Tensor:
    local = torch.zeros(sharding.local_shape(shape))
    return axes.from_local(local, sharding.spec, mesh=mesh, shape=shape) if view == "D" else local


@pytest.mark.parametrize(("line", "view"), [case for case in CASES if case.values[0].error is None])
def test_what_runs_is_what_the_table_says(world: dict[int, Mesh], line: Row, view: str):
    mesh = world[line.mesh.names["cp"]]
    wholes = [mesh.sharding(spec, **_sizes_of(spec, line.sizes)) for spec in line.specs]
    tensors = [tensor(mesh, s.sized(shape), shape, view) for s, shape in zip(wholes, line.shapes, strict=True)]
    options = {"mesh": mesh, "sizes": dict(line.sizes)}
    with CommDebugMode() as sent:
        if line.kind == "einsum":
            found = einsum(*tensors, line.text, **options)
        elif line.kind == "reduce":
            found = reduce(tensors[0], line.text, line.op, **options)
        else:
            found = {"rearrange": rearrange, "repeat": repeat}[line.kind](tensors[0], line.text, **options)
    assert sent.get_total_counts() == len(line.collectives)
    assert line.result is not None
    promised = mesh.sharding(line.result)
    shape = solved(line, view).result.shape
    if view == "D":
        assert axes.sharding_of(found).is_equivalent(promised, shape)
    assert (found.to_local() if view == "D" else found).shape == promised.local_shape(shape)


RESHARDED = [
    (45, "b@* s@tp d", "b@dp s@cp d", "_@dp _@tp _"),
    (45, "b s@tp d", "b@dp s@cp d", "_ _@tp _"),
    (46, "b s d@tp", "b s@tp d", "_ _ _@tp"),
    (47, "b s d", "b s@cp d | sum@tp", "_ _ _"),
    (47, "b s d | *", "b s@cp d | sum@tp", "_ _ _ | sum@tp"),
]


@pytest.mark.parametrize(("number", "spec", "has", "becomes"), RESHARDED)
def test_the_rows_about_reshard_hold(world: dict[int, Mesh], number: int, spec: str, has: str, becomes: str):
    x = tensor(world[2], world[2].sharding(has), SHAPE, "D")
    assert axes.spec_of(axes.reshard(x, spec)) == becomes


def test_the_row_about_regions_holds(world: dict[int, Mesh]):
    x = tensor(world[2], world[2].sharding("b@dp s d"), SHAPE, "D")
    seen = []
    y = axes.shard_map(lambda local: seen.append(local.shape) or local, "b s d -> b s d")(x)
    assert seen == [torch.Size((4, 16, 32))]
    assert axes.spec_of(y) == "_@dp _ _"


@pytest.mark.parametrize("function", [einsum, rearrange])
def test_the_row_about_mixtures_holds(world: dict[int, Mesh], function):
    mixed = [tensor(world[2], world[2].sharding("b d"), (8, 32), view) for view in "DL"]
    with pytest.raises(ShardingError, match="DTensors or plain tensors, not both"):
        function(*mixed, "b d, b d -> b") if function is einsum else function(mixed, "n b d -> n d b")


def test_the_table_is_whole():
    elsewhere = {number for number, *_ in RESHARDED} | {48, 51, "47d"}  # 47d is in test_blocks.py
    assert {line.number for line in TABLE} | elsewhere == {*range(1, 52), "47a", "47b", "47c", "47d"}
