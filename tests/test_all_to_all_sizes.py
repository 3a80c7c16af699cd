"""`all_to_all` with sizes of pieces, against one process that sees every rank's tensor.

The sizes are a matrix, what coordinate i sends to coordinate j, and the exchange transposes a matrix
of blocks of these sizes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, DesyncError, ShardingError, SizeError
from axes.runtime.lines import axis_layout
from tests.test_collectives import AXES, DECLARATION, FLOATS, OTHERS, mesh, random

Matrix = list[list[int]]


@dataclass(frozen=True)
class Case:
    axis: str | tuple[str, ...]
    sizes: Matrix
    rest: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    strided: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    axis = draw(st.sampled_from(AXES))
    size = axis_layout(axes.Mesh(*DECLARATION, ep=4), axis)[0].size
    most = draw(st.sampled_from([0, 1, 3, 7]))
    numbers = st.lists(st.integers(0, most), min_size=size, max_size=size)
    matrix = draw(st.lists(st.just([0] * size) | numbers, min_size=size, max_size=size))
    rest = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dim = draw(st.integers(-len(rest) - 1, len(rest)))
    dtype = draw(st.sampled_from([*FLOATS, *OTHERS]))
    return Case(axis, matrix, rest, dim, dtype, draw(st.booleans()), draw(st.integers(0, 2**31)))


def exchanged(xs: list[torch.Tensor], sizes: Matrix, dim: int) -> list[torch.Tensor]:
    """What each coordinate gets, from the inputs of all."""
    blocks = [x.split(row, dim) for x, row in zip(xs, sizes, strict=True)]
    return [torch.cat([row[i] for row in blocks], dim) for i in range(len(xs))]


def check(cases: list[Case]) -> None:
    with mesh() as m:
        for case in cases:
            ranks = list(m.ranks_of(axis_layout(m, case.axis)[0]))
            check_case(case, ranks, ranks.index(dist.get_rank()))


def check_case(case: Case, ranks: list[int], here: int) -> None:
    sends, receives = case.sizes[here], [row[here] for row in case.sizes]
    at = case.dim % (len(case.rest) + 1)
    shapes = [(*case.rest[:at], sum(row), *case.rest[at:]) for row in case.sizes]
    xs = [random(s, case.dtype, case.strided, case.seed + r) for s, r in zip(shapes, ranks, strict=True)]
    x, before = xs[here], xs[here].clone()

    def there(x: torch.Tensor) -> torch.Tensor:
        return axes.all_to_all(x, case.axis, case.dim, case.dim, send_sizes=sends, recv_sizes=receives)

    def back(x: torch.Tensor) -> torch.Tensor:
        return axes.all_to_all(x, case.axis, case.dim, at, send_sizes=tuple(receives), recv_sizes=tuple(sends))

    got = there(x)
    same(case, got, exchanged(xs, case.sizes, at)[here])
    same(case, back(got), x)
    same(case, x, before)
    transposed = axes.all_to_all(torch.tensor(sends), case.axis)
    assert transposed.tolist() == receives, case
    if case.dtype in FLOATS:
        x = x.detach().requires_grad_()
        weight = random(tuple(got.shape), case.dtype, not case.strided, case.seed - 1)
        (gradient,) = torch.autograd.grad(there(x), x, weight)
        same(case, gradient, back(weight))
    if case.dtype == torch.float64:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad((there(x**3) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(first, 6 * x**5)
        torch.testing.assert_close(second, 30 * x.detach() ** 4)


def same(case: Case, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit: nothing is computed."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), f"{case}: {got} instead of {wanted}"
    bits = [x.contiguous().flatten().view(torch.uint8) for x in (got, wanted)]
    assert torch.equal(*bits), f"{case}: {got} instead of {wanted}"


@settings(max_examples=8, phases=[Phase.generate], deadline=None, derandomize=True, database=None)
@given(st.lists(cases(), min_size=30, max_size=30))
def test_blocks_are_transposed_there_and_back_and_so_are_gradients(pool, cases):
    pool.run(check, cases)


def equal_sizes() -> None:
    with mesh():
        x = random((3, 8), torch.float32, True, dist.get_rank())
        for dim, axis in ((0, ()), (1, "rest"), (-1, ("dp", "cp", "tp"))):
            size = axes.axis_size(axis)
            each = [x.shape[dim] // size] * size
            got = axes.all_to_all(x, axis, dim, dim, send_sizes=each, recv_sizes=each)
            assert torch.equal(got, axes.all_to_all(x, axis, dim, dim))


def test_equal_sizes_are_as_none(pool):
    pool.run(equal_sizes)


# ----------------------------------------------------------------------------------- what it sends


def counted() -> list[int]:
    x = torch.ones(3, 2, requires_grad=True)
    with mesh():
        here = axes.axis_index("tp")
        sends, receives = ([0, 3], [0, 0]) if here == 0 else ([0, 3], [3, 3])
        with CommDebugMode() as forward:
            y = axes.all_to_all(x, "tp", send_sizes=sends, recv_sizes=receives)
            assert axes.all_to_all(x, (), send_sizes=[3], recv_sizes=[3]) is x
        with CommDebugMode() as backward:
            y.sum().backward()
    return [len(y), forward.get_total_counts(), backward.get_total_counts()]


def test_it_is_one_collective_each_way_also_for_a_rank_that_gets_nothing(pool):
    assert pool.run(counted) == [[0, 1, 1], [6, 1, 1]] * 4


def test_a_simulated_world_gives_shapes():
    none, some = [0] * 8, [0, *[5] * 7]
    with axes.simulate(512, rank=72), axes.init_mesh("dp=64 tp=8", device_type="cpu"):
        for sends, receives in ((none, some), (some, none), (none, none), ([2] * 8, [2, *[1] * 7])):
            x = torch.ones(4, sum(sends), requires_grad=True)
            y = axes.all_to_all(x, "tp", 1, 1, send_sizes=sends, recv_sizes=receives)
            y.sum().backward()
            assert y.shape == (4, sum(receives))
            assert x.grad.shape == x.shape


# ---------------------------------------------------------------------------------------- mistakes

X = torch.ones(6, 4)
TOLD = (
    "A small all_to_all over 'rest' tells ranks what they receive: "
    "axes.all_to_all(torch.tensor(send_sizes), axis).tolist()"
)
GOOD = [1, 2, 3, 0]
MISTAKES = [
    (
        {"send_sizes": GOOD},
        ShardingError,
        f"all_to_all takes send_sizes and recv_sizes together; recv_sizes is missing. {TOLD}",
    ),
    (
        {"recv_sizes": GOOD},
        ShardingError,
        f"all_to_all takes send_sizes and recv_sizes together; send_sizes is missing. {TOLD}",
    ),
    (
        {"send_sizes": GOOD, "recv_sizes": GOOD, "split_dim": 1},
        ShardingError,
        "all_to_all with send_sizes cuts and concatenates along one dim; found split_dim=1 and concat_dim=0. "
        "Write split_dim=1, concat_dim=1",
    ),
    (
        {"send_sizes": [1, 2, 3], "recv_sizes": GOOD},
        ShardingError,
        "all_to_all: send_sizes are one number for each of the 4 coordinates of 'rest'; found 3, [1, 2, 3]",
    ),
    (
        {"send_sizes": GOOD, "recv_sizes": (*GOOD, 0)},
        ShardingError,
        "all_to_all: recv_sizes are one number for each of the 4 coordinates of 'rest'; found 5, (1, 2, 3, 0, 0)",
    ),
    (
        {"send_sizes": [1, 2, 4, -1], "recv_sizes": GOOD},
        SizeError,
        "all_to_all over 'rest': send_sizes are 0 or more, of 63 bits; found [1, 2, 4, -1]",
    ),
    (
        {"send_sizes": [1, 2, 2, 2], "recv_sizes": GOOD},
        SizeError,
        "all_to_all over 'rest': send_sizes [1, 2, 2, 2] add up to 7; dim 0 of [6, 4] has 6 elements",
    ),
    (
        {"send_sizes": GOOD, "recv_sizes": GOOD, "split_dim": 1, "concat_dim": -1},
        SizeError,
        "all_to_all over 'rest': send_sizes [1, 2, 3, 0] add up to 6; dim 1 of [6, 4] has 4 elements",
    ),
    (
        {"send_sizes": [1, 2, 3.0, 0], "recv_sizes": GOOD},
        ShardingError,
        "all_to_all: send_sizes are whole numbers, one for each coordinate of 'rest'; found [1, 2, 3.0, 0]",
    ),
    (
        {"send_sizes": GOOD, "recv_sizes": [True, 2, 3, 0]},
        ShardingError,
        "all_to_all: recv_sizes are whole numbers, one for each coordinate of 'rest'; found [True, 2, 3, 0]",
    ),
    (
        {"send_sizes": 6, "recv_sizes": GOOD},
        ShardingError,
        "all_to_all: send_sizes are whole numbers, one for each coordinate of 'rest'; found 6",
    ),
    (
        {"send_sizes": torch.tensor(GOOD), "recv_sizes": GOOD},
        ShardingError,
        "all_to_all: send_sizes are Python numbers; found a tensor. Write send_sizes=counts.tolist()",
    ),
]


def mistakes() -> list[str]:
    found = []
    with mesh(), CommDebugMode() as sent:
        for options, error, text in MISTAKES:
            try:
                axes.all_to_all(X, "rest", **options)
            except AxesError as caught:
                found.append("" if (type(caught), str(caught)) == (error, text) else f"{caught!r} instead of {text!r}")
            else:
                found.append(f"no error, expected {text!r}")
        try:
            other = [n + 1 for n in GOOD]
            axes.all_to_all(X, "rest", send_sizes=GOOD, recv_sizes=other)
        except SizeError as caught:
            here = axes.axis_index("rest")
            text = (
                f"all_to_all over 'rest': this rank, coordinate {here}, sends itself {GOOD[here]} in send_sizes and "
                f"receives {other[here]} from itself in recv_sizes"
            )
            found.append("" if str(caught) == text else str(caught))
    return [*filter(None, found), *([] if sent.get_total_counts() == 0 else ["something was sent"])]


def test_mistakes_are_errors_that_say_what_to_write_before_anything_is_sent(pool):
    assert pool.run(mistakes) == [[]] * 8


def disagreeing() -> list[str]:
    os.environ["AXES_CHECK"] = "1"
    try:
        with axes.init_mesh("dp=2 tp=4", device_type="cpu"):
            odd = dist.get_rank() == 6
            each = [1, 1, 1, 1]
            told = []
            for x, receives in (
                (torch.ones(4, 2), each),
                (torch.ones(4, 2), [1, 9, 1, 1] if odd else each),
                (torch.ones(4, 3 if odd else 2, dtype=torch.float64 if odd else torch.float32), each),
            ):
                try:
                    y = axes.all_to_all(x, "tp", send_sizes=each, recv_sizes=receives)
                    told.append("" if torch.equal(y, x) else "other values")
                except DesyncError as error:
                    told.append(str(error))
            return told
    finally:
        del os.environ["AXES_CHECK"]


def test_with_axes_check_ranks_in_disagreement_raise_on_every_rank_of_the_axis(pool):
    found = pool.run(disagreeing)
    assert found[:4] == [["", "", ""]] * 4
    for rank, (fine, sizes, rows) in enumerate(found[4:], 4):
        assert fine == ""
        assert "ranks disagree in operation 2 of ranks 4..7: all_to_all over 'tp' of [*, 2] float32, dim 0" in sizes
        assert sizes.endswith("\n  rank 5 sends 1 to rank 6, which expects 9"), sizes
        assert "rank 6: all_to_all over 'tp' of [*, 3] float64, dim 0, at " in rows
        assert "all_to_all over 'tp' of [*, 2] float32, dim 0, at " in rows, (rank, rows)


# ----------------------------------------------------------------------------------- torch.compile


def to_and_fro(x: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
    y = axes.all_to_all(x, "tp", send_sizes=sends, recv_sizes=receives)
    return axes.all_to_all((y @ y.new_ones(2, 2)).sin(), "tp", send_sizes=receives, recv_sizes=sends)


def told_by_tensor(x: torch.Tensor, sends: torch.Tensor) -> torch.Tensor:
    return to_and_fro(x, sends.tolist(), axes.all_to_all(sends, "tp").tolist())


def compiled() -> None:
    with axes.init_mesh("tp=2", device_type="cpu"):
        here = dist.get_rank()
        constant = torch.compile(to_and_fro, fullgraph=True, backend="aot_eager")
        broken = torch.compile(told_by_tensor, backend="aot_eager")
        for sizes in ([[0, 3], [0, 2]], [[2, 3], [4, 1]], [[6, 5], [3, 2]]):
            sends, receives = sizes[here], [row[here] for row in sizes]
            x = random((sum(sends), 2), torch.float64, True, here).requires_grad_()
            for fast, told in ((constant, (sends, receives)), (broken, (torch.tensor(sends),))):
                y, wanted = fast(x, *told), (x @ x.new_ones(2, 2)).sin()
                torch.testing.assert_close(y, wanted)
                torch.testing.assert_close(*(torch.autograd.grad((z**2).sum(), x) for z in (y, wanted)))


def test_it_compiles_whole_for_constant_sizes_and_broken_for_those_of_a_tensor(warm):
    warm(compiled, 2, timeout=240)
