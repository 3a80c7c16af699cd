"""The pool of ranks that the multi-process tests share: it survives what a test does to it."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from axes.algebra.errors import AxesError, DesyncError
from axes.runtime.transfer import Call, dumps, loads

kept: list[int] = []


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_data_travels_unchanged(value: object):
    assert loads(dumps(value)) == value
    function, arguments = loads(Call.of(divmod, (value, 2)).data)
    assert (function, arguments) == (divmod, (value, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_tensors_travel_by_value_with_their_layout(dtype: torch.dtype):
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for y in (x, x.permute(2, 0, 1), x[1:, ::2], x[:0], x[0, 0, 0]):
        z = loads(dumps(y))
        assert torch.equal(z, y)
        assert (z.dtype, z.stride()) == (y.dtype, y.stride())
        assert not z.is_shared()


def sum_of_ranks() -> int:
    x = torch.tensor(dist.get_rank())
    dist.all_reduce(x)
    return int(x)


def keep(value: int) -> int:
    kept.append(value)
    return len(kept)


def threads() -> tuple[int, int]:
    return torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])


def first_dtensor() -> list[float]:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    x = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])
    return (x + 1).full_tensor().tolist()


def fail(*ranks: int) -> str:
    if dist.get_rank() in ranks:
        raise DesyncError(f"rank {dist.get_rank()} disagrees")
    return "fine"


def fail_and_leave_the_others_waiting(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("before the barrier")
    dist.barrier()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave(code: int) -> None:
    sys.exit(code)


def test_a_call_runs_on_eight_ranks_of_one_world(pool):
    assert pool.run(dist.get_rank) == list(range(8))
    assert pool.run(sum_of_ranks) == [28] * 8


def test_the_processes_live_on_between_calls(pool):
    before = pool.run(os.getpid)
    count = pool.run(keep, 7)[0]
    assert pool.run(keep, 8) == [count + 1] * 8
    assert pool.run(os.getpid) == before == pool.pids


def test_each_rank_has_one_thread(pool):
    assert pool.run(threads) == [(1, 1)] * 8


def test_dtensors_work_on_the_ranks(pool):
    assert pool.run(first_dtensor) == [[float(i) for i in range(1, 17)]] * 8


def test_a_world_of_another_size_is_a_world_of_its_own(pool):
    assert pool.run(sum_of_ranks, world=3) == [3] * 3


def test_an_exception_on_all_ranks_reaches_the_test_and_leaves_the_pool_alive(pool):
    before = pool.run(os.getpid)
    with pytest.raises(DesyncError, match=r"rank \d disagrees") as caught:
        pool.run(fail, *range(8))
    assert "in fail" in "".join(caught.value.__notes__)
    assert pool.run(os.getpid) == before


def test_an_exception_on_one_rank_reaches_the_test_and_leaves_the_pool_alive(pool):
    before = pool.run(os.getpid)
    with pytest.raises(DesyncError, match="rank 5 disagrees") as caught:
        pool.run(fail, 5)
    assert "rank 5 of 8 failed first" in caught.value.__notes__[0]
    assert "ranks 0 to 4 and 6 to 7 finished" in caught.value.__notes__[1]
    assert pool.run(os.getpid) == before


def test_ranks_that_wait_for_a_failed_one_are_ended_and_the_pool_starts_again(pool):
    before = pool.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(ValueError, match="before the barrier") as caught:
        pool.run(fail_and_leave_the_others_waiting, 3)
    assert time.monotonic() - began < 20
    notes = "\n".join(caught.value.__notes__)
    assert "ranks 0 to 2 and 4 to 7 hadn't finished" in notes
    assert "in fail_and_leave_the_others_waiting" in notes
    assert not any(lives(pid) for pid in before)
    assert pool.run(sum_of_ranks) == [28] * 8


def test_a_call_that_takes_too_long_is_ended_and_the_pool_starts_again(pool):
    before = pool.run(os.getpid)
    with pytest.raises(AxesError, match="sleep: time is up, ranks 0 to 7 of 8 hadn't finished"):
        pool.run(sleep, 60, timeout=0.5)
    assert not any(lives(pid) for pid in before)
    assert pool.run(sum_of_ranks) == [28] * 8


def test_a_rank_that_is_killed_is_named_and_the_pool_starts_again(pool):
    with pytest.raises(AxesError, match="rank 6 of 8 was killed by SIGKILL"):
        pool.run(die, 6)
    assert pool.run(sum_of_ranks) == [28] * 8


def test_a_rank_that_exits_has_failed_without_ending_the_tests(pool):
    before = pool.run(os.getpid)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        pool.run(leave, 3)
    assert pool.run(os.getpid) == before


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
