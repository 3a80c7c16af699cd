"""`axes.debug(check=True)`: ranks that do different things are told so, ranks that do the same aren't; and what is said
where a rank dies, or where groups have been ended.

A program here is a list of steps, each of which communicates. In a pair of programs that differ one rank runs the other
one; both end with a sum over all ranks, as a step of training does.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axes
from axes.algebra.errors import AxesError, DesyncError, MeshError
from axes.runtime import flags

Step = tuple[Any, ...]
Program = tuple[Step, ...]

NAMED = ("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute")
EVEN = ((4, 4), (8, 4), (4, 12))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SPECS = ("a@dp b@tp", "a b", "a@tp b", "a@(dp tp) b", "a b@dp")
EXPRESSIONS = (
    ("rearrange", "a@dp b@tp -> a b"),
    ("rearrange", "a@dp b@tp -> b a"),
    ("rearrange", "a@dp b@tp -> a b@dp"),
    ("reduce", "a@dp b@tp -> a@dp"),
    ("reduce", "a@dp b@tp -> b"),
    ("reduce", "a@dp b@tp ->"),
)
END: Step = ("psum", ("dp", "tp"), (3,), torch.float32)


def named(pick: random.Random) -> Step:
    return pick.choice(NAMED), pick.choice(("dp", "tp")), pick.choice(EVEN), pick.choice(DTYPES)


def whole(pick: random.Random) -> Step:
    """A step of all ranks."""
    shape, dtype = pick.choice(EVEN), pick.choice(DTYPES)
    kind = pick.choice(("reshard", "expression", "gradient", "source"))
    if kind == "reshard":
        return kind, pick.choice(SPECS[1:]), shape, dtype
    if kind == "expression":
        return kind, pick.choice(EXPRESSIONS), shape, dtype
    return kind, pick.choice((0, 1, 2, 3)) if kind == "source" else pick.choice(("dp", "tp")), shape, dtype


def changed(kind: str, pick: random.Random) -> tuple[Program, Program]:
    """Two programs that differ in one thing."""
    step = named(pick) if kind in ("operation", "axis") or pick.random() < 0.5 else whole(pick)
    what, how, shape, dtype = step
    other: Program
    if kind == "operation":
        other = ((pick.choice([name for name in NAMED if name != what]), how, shape, dtype),)
    elif kind == "axis":
        other = ((what, "dp" if how == "tp" else "tp", shape, dtype),)
    elif kind == "shape":
        other = ((what, how, pick.choice([each for each in EVEN if each != shape]), dtype),)
    elif kind == "dtype":
        other = ((what, how, shape, pick.choice([each for each in DTYPES if each != dtype])),)
    elif kind == "target":
        step = "reshard", pick.choice(SPECS[1:]), shape, dtype
        other = (("reshard", pick.choice([each for each in SPECS[1:] if each != step[1]]), shape, dtype),)
    elif kind == "expression":
        step = "expression", pick.choice(EXPRESSIONS), shape, dtype
        other = (("expression", pick.choice([each for each in EXPRESSIONS if each != step[1]]), shape, dtype),)
    elif kind == "gradient":
        step = "gradient", pick.choice(("dp", "tp")), shape, dtype
        other = (("psum", *step[1:]),)
    elif kind == "source":
        step = "source", 1, shape, dtype
        other = (("source", 2, shape, dtype),)
    elif kind == "skipped":
        other = ()
    else:
        assert kind == "order"
        second = step
        while second == step:
            # Steps over two axes may go in any order: nobody waits in turn.
            one_axis = what in NAMED or what == "gradient"
            second = (pick.choice(NAMED), how, *named(pick)[2:]) if one_axis else whole(pick)
        return (step, second), (second, step)
    return (step,), other


KINDS = ["operation", "axis", "shape", "dtype", "target", "expression", "gradient", "source", "skipped", "order"]


def differing(number: int) -> tuple[str, int, Program, Program]:
    """What differs, on which rank, and what the others and it run."""
    pick = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    before = tuple(pick.choice((named, whole))(pick) for _ in range(pick.randrange(2)))
    ours, theirs = changed(kind, pick)
    return kind, pick.randrange(4), (*before, *ours, END), (*before, *theirs, END)


def run(step: Step, mesh: axes.Mesh) -> None:
    what, how, shape, dtype = step
    x = torch.ones(shape, dtype=dtype)
    if what in NAMED:
        more = {"shift": 1} if what == "ppermute" else {}
        getattr(axes, what)(x, how, mesh=mesh, **more)
    elif what == "gradient":
        axes.psum(x.requires_grad_(), how, mesh=mesh).sum().backward()
    elif what == "source":
        axes.shard(x, "a@dp b", mesh=mesh, source_rank=how)
    elif what == "reshard":
        axes.reshard(axes.shard(x, "a@dp b@tp", mesh=mesh), how)
    else:
        kind, text = how
        more = ("sum",) if kind == "reduce" else ()
        axes.unshard(getattr(axes, kind)(axes.shard(x, "a@dp b@tp", mesh=mesh), text, *more))


def prepared(limit: float = 20) -> axes.Mesh:
    """A mesh whose groups exist: making one is compared by itself."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu", timeout=limit)
    for names in ("dp", "tp", ("dp", "tp")):
        axes.psum(torch.ones(1), names, mesh=mesh)
    axes.reshard(axes.shard(torch.ones(4, 4), "a@dp b@tp", mesh=mesh), "a b")
    return mesh


def told_apart(numbers: range) -> list[tuple[int, float, str]]:
    """For each pair of programs how long this rank took to its error, and what that says."""
    mesh, rank, found = prepared(1.5), dist.get_rank(), []
    patient = dist.new_group(timeout=timedelta(minutes=1))
    for number in numbers:
        _, odd, ours, theirs = differing(number)
        said, began = "", time.monotonic()
        try:
            with axes.debug(check=True):
                began = time.monotonic()
                for step in theirs if rank == odd else ours:
                    run(step, mesh)
        except DesyncError as error:
            said = str(error)
        found.append((number, time.monotonic() - began, said))
        dist.barrier(patient)
    return found


def test_programs_that_differ_on_one_rank_are_told_so_on_every_rank(world):
    every = world(told_apart, 4, range(30), timeout=300)
    for each in zip(*every, strict=True):
        number = each[0][0]
        assert all(said for _, _, said in each), (differing(number), each)
        here = [said for _, _, said in each if "test_check.py:" in said]
        assert len(here) == 4, (differing(number), each)


def test_what_differs_is_shown_with_both_sides_and_their_lines(world):
    found = world(both_sides, 4)
    assert found[0] == found[1]
    for said in found[2:]:
        assert said.startswith("ranks disagree in operation 1 of ranks 2, 3:\n  rank "), said
        assert "\n  rank 2: psum over 'tp' of [3] float32, at tests/test_check.py:" in f"\n{said}"
        assert "\n  rank 3: pmax over 'tp' of [3] float32, at tests/test_check.py:" in f"\n{said}"
        assert said.count(" in both_sides") == 2


def both_sides() -> str:
    mesh = prepared()
    axes.debug(check=True)
    try:
        if dist.get_rank() == 3:
            axes.pmax(torch.ones(3), "tp", mesh=mesh)
        else:
            axes.psum(torch.ones(3), "tp", mesh=mesh)
    except DesyncError as error:
        return str(error)
    return ""


# --- no false alarm


def same(pick: random.Random) -> list[Step]:
    """A program of all ranks, some steps of which are of one line of ranks alone."""
    steps: list[Step] = []
    for _ in range(pick.randrange(1, 5)):
        kind = pick.choice(("named", "whole", "uneven", "line", "orders", "sizes"))
        if kind == "named":
            steps.append(named(pick))
        elif kind == "whole":
            steps.append(whole(pick))
        else:
            steps.append((kind, pick.randrange(2), (pick.randrange(1, 9), pick.randrange(1, 9)), pick.choice(DTYPES)))
    return steps


def run_freely(step: Step, mesh: axes.Mesh) -> None:
    """Steps that a rank may run otherwise than its neighbours."""
    what, how, shape, dtype = step
    here = mesh.at(dist.get_rank()).coordinate
    if what == "uneven":
        x = axes.shard(torch.arange(shape[0] * shape[1]).view(shape).to(dtype), "a@dp b@tp", mesh=mesh)
        moved = axes.reshard(x, ("a@tp b", "a b@(dp tp)")[how])
        assert torch.equal(axes.unshard(moved), axes.unshard(x))
    elif what == "line":
        if here["dp"] == how:  # the ranks of one line, on a mesh of their own
            x = axes.shard(torch.ones(shape, dtype=dtype), "a@tp b", mesh=mesh["tp"])
            assert torch.equal(axes.unshard(x), torch.ones(shape, dtype=dtype))
    elif what == "orders":
        # Rank 0 begins with the other axis; nobody waits for ever.
        for axis in ("dp", "tp") if dist.get_rank() == 0 else ("tp", "dp"):
            assert torch.equal(
                axes.psum(torch.ones(shape, dtype=dtype), axis, mesh=mesh), torch.full(shape, 2.0).to(dtype)
            )
    else:
        sends, receives = ([1, how], [1, 2]) if here["tp"] == 0 else ([2, 3], [how, 3])
        x = torch.ones(sum(sends), 2, dtype=dtype)
        axes.all_to_all(x, "tp", send_sizes=sends, recv_sizes=receives, mesh=mesh)


def undisturbed(numbers: range) -> int:
    """How many keys the programs leave in the store."""
    mesh, store = prepared(), dist.group.WORLD.get_group_store()

    def run_all() -> None:
        for number in numbers:
            for step in same(random.Random(number)):
                (run_freely if step[0] in ("uneven", "line", "orders", "sizes") else run)(step, mesh)

    run_all()  # without checks, so that every group is there, whose keys stay
    axes.debug(check=True)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    run_all()
    dist.barrier()
    return store.num_keys() - before


def test_equal_programs_raise_no_alarm_and_leave_no_key(world):
    assert world(undisturbed, 4, range(200), timeout=300) == [0] * 4


CALLS = int(os.environ.get("CHECKED_CALLS", "1000"))
"""With CHECKED_CALLS=10000 it is what is promised, in a minute."""


class Columns(torch.nn.Module):
    """Of rows over dp: a product whose columns lie over tp, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return axes.psum((x @ self.weight.T).square().sum(1), "tp")


def uneven_rows(rows: int) -> float:
    """First and second derivatives by plain shards of which ranks have unequal ones, as of a last batch."""
    mesh = prepared()
    model = axes.shard_module(Columns(), {"weight": "f@tp d"}, mesh)
    axes.shard_map(model, "b@dp d -> b@dp", mesh)
    mine = mesh.sharding("b@dp d").local_indices((rows, 3))[0]
    with axes.debug(check=True):
        for needs_gradient in (True, False):
            x = torch.ones(rows, 3)[mine].clone().requires_grad_(needs_gradient)
            (first,) = torch.autograd.grad(model(x).square().sum(), model.weight, create_graph=True)
            (second,) = torch.autograd.grad(first, model.weight, first.detach())
            model(x).sum().backward()
    return axes.unshard(second).abs().sum().item()


def test_ranks_with_unequal_plain_shards_raise_no_alarm(world):
    for rows in (1, 5):
        assert len({*world(uneven_rows, 4, rows)}) == 1


def many_calls(calls: int) -> tuple[int, float]:
    mesh, store = axes.init_mesh("tp=2", device_type="cpu"), dist.group.WORLD.get_group_store()
    axes.debug(check=True)
    x = torch.ones(1)
    axes.psum(x, "tp", mesh=mesh)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    total = sum(axes.psum(x, "tp", mesh=mesh).item() for _ in range(calls))
    dist.barrier()
    return store.num_keys() - before, total


def test_no_key_is_left_by_any_number_of_calls(world):
    assert world(many_calls, 2, CALLS, timeout=300) == [(0, 2.0 * CALLS)] * 2


# --- the flag


def flagged() -> list[str]:
    """What ranks are told that ask for something else."""
    mesh, odd, told = prepared(3), dist.get_rank() == 2, []
    patient = dist.new_group(timeout=timedelta(minutes=1))

    def attempt(call: Any) -> None:
        try:
            call()
            told.append("")
        except DesyncError as error:
            told.append(str(error))
        dist.barrier(patient)

    def by_environment() -> None:
        os.environ["AXES_CHECK"] = "1" if odd else ""
        try:
            axes.init_mesh("dp=2 tp=2", device_type="cpu", timeout=3)
        finally:
            os.environ["AXES_CHECK"] = ""

    def leaving_early() -> None:
        with axes.debug(check=True):
            if not odd:
                axes.psum(torch.ones(1), "tp", mesh=mesh)

    def one_alone() -> None:
        if odd:
            axes.debug(check=True)
        else:
            axes.init_mesh("dp=4", device_type="cpu", timeout=3)

    attempt(by_environment)
    attempt(lambda: axes.debug(check=odd))
    attempt(leaving_early)
    attempt(lambda: axes.psum(torch.ones(1), "tp", mesh=mesh))
    attempt(one_alone)
    return told


def test_a_rank_on_which_the_flag_differs_is_told(world):
    found = world(flagged, 4)
    for rank, (environment, call, early, after, alone) in enumerate(found):
        assert "operations are compared (AXES_CHECK=1, axes.debug)" in environment
        assert "rank 2: axes.debug(check=True), at tests/test_check.py:" in call
        assert "axes.debug(check=False), at tests/test_check.py:" in call
        assert rank == 3 or early == ""
        assert "axes.debug, which all ranks of the job call" in alone
        assert after == ""
    assert "rank 2 didn't come to operation 1 of ranks 2, 3 within 3 s" in found[3][2]
    assert "rank 2 has left the block of axes.debug(check=True), at tests/test_check.py:" in found[3][2]


def late() -> str:
    mesh = axes.init_mesh("tp=2", device_type="cpu", timeout=1)
    axes.psum(torch.ones(3), "tp", mesh=mesh)
    axes.debug(check=True)
    axes.pmin(torch.ones(3), "tp", mesh=mesh)
    if dist.get_rank() == 1:
        time.sleep(1.5)  # it computes for long, or waits for something else
        return ""
    with pytest.raises(DesyncError) as caught:
        axes.psum(torch.ones(3), "tp", mesh=mesh)
    return str(caught.value)


def test_a_rank_that_doesnt_come_is_named_with_what_it_did_last(world):
    said, _ = world(late, 2)
    assert said.startswith("rank 1 didn't come to operation 2 of ranks 0, 1 within 1 s:\n")
    assert "rank 1 was last seen passing in operation 1 of ranks 0, 1: pmin over 'tp' of [3] float32, at tests/" in said
    assert "rank 0 waited for operation 2 of ranks 0, 1: psum over 'tp' of [3] float32, at tests/" in said


# --- several threads, several limits


def on_lanes(names: str) -> list[Any]:
    """Each thread has a lane of its own; each rank is late in another one, so that each waits for the other's lane."""
    if names == "axes":
        lanes = [axes.GroupOptions(lane=lane) for lane in ("a", "b")]
        meshes = [axes.init_mesh("x=2", device_type="cpu", timeout=20, options={"x": lane}) for lane in lanes]
    else:
        grads = {"grads": axes.GroupOptions(lane="grads")}
        meshes = [axes.init_mesh("x=2", "grads = x", device_type="cpu", timeout=20, options=grads)] * 2
    for mesh in meshes:
        mesh.create_groups()
    x = axes.shard(torch.arange(2.0), "a@x", mesh=meshes[0])
    axes.debug(check=True)
    found: dict[int, Any] = {}

    def work(lane: int) -> None:
        try:
            for _ in range(3):
                if lane != meshes[0].rank:
                    time.sleep(0.3)
                found[lane] = axes.psum(
                    torch.ones(1), ["x", "grads"][lane if names == "one axis" else 0], mesh=meshes[lane]
                ).item()
                if not lane:
                    axes.unshard(x)
        except DesyncError as error:
            found[lane] = str(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


@pytest.mark.parametrize("names", ["axes", "one axis"])
def test_threads_on_lanes_of_the_same_ranks_count_their_operations_apart(world, names):
    assert world(on_lanes, 2, names) == [[2.0, 2.0]] * 2


def said_last(first: float, second: float, late: float, dtensors: bool) -> Any:
    """What comes of an operation on the second of two equal meshes, to which rank 1 comes late."""
    mesh = axes.init_mesh("tp=2", device_type="cpu", timeout=first)
    x = axes.shard(torch.ones(4), "a@tp", mesh=mesh)
    axes.debug(check=True)

    def operation(mesh: axes.Mesh) -> float:
        if dtensors:
            return axes.to_local(axes.reshard(x, "a", mesh=mesh)).sum().item()
        return axes.psum(torch.ones(4), "tp", mesh=mesh).sum().item()

    operation(mesh)
    again = axes.init_mesh("tp=2", device_type="cpu", timeout=second)
    if mesh.rank == 1:
        time.sleep(late)
    started = time.monotonic()
    try:
        return operation(again)
    except DesyncError as error:
        return time.monotonic() - started, str(error)
    finally:
        time.sleep(0.5)  # the late rank reads the others' end before these leave


@pytest.mark.parametrize("dtensors", [False, True])
def test_ranks_wait_as_long_as_the_last_of_equal_meshes_says(world, dtensors):
    assert world(said_last, 2, 1, 30, 2.5, dtensors) == [4.0 if dtensors else 8.0] * 2
    (seconds, said), _ = world(said_last, 2, 60, 1, 3, dtensors)
    assert 1 <= seconds < 3
    assert said.startswith("rank 1 didn't come to operation 2 of ranks 0, 1 within 1 s:")


# --- clipping, transfers, keys


def clipped(what: str) -> Any:
    """What clipping says where ranks differ in one thing."""
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu", timeout=2)
    axes.debug(check=True)
    rank, parameters = mesh.rank, []
    for shape, spec in (((4, 4), "a@dp b@tp"), ((4, 2), "a@dp b@tp"), ((4,), "a")):
        parameter = torch.nn.Parameter(axes.shard(torch.ones(shape), spec, mesh=mesh))
        parameter.grad = axes.shard(torch.full(shape, 2.0), spec, mesh=mesh)
        parameters.append(parameter)
    most, order = 1.0, 2.0
    if what == "order":
        order = 2.0 if rank < 2 else 3.0
    elif what == "limit":
        most = 1.0 if rank % 2 else 2.0
    elif what in ("fewer", "fewer replicated") and rank == 1:
        parameters.pop(1 if what == "fewer" else 2)
    elif what == "late" and rank == 0:
        time.sleep(4)
        return "", 0.0
    started = time.monotonic()
    try:
        return str(axes.nn.clip_grad_norm_(parameters, most, norm_type=order).item()), 0.0
    except DesyncError as error:
        return str(error), time.monotonic() - started


NORM = "the norm of gradients, sum of 1 parts of"
CLIPPED = {
    "order": (f"{NORM} 3 tensors (", ", of order 2.0, clipped to 1.0, at", ", of order 3.0, clipped to 1.0, at"),
    "limit": (", of order 2.0, clipped to 1.0, at", ", of order 2.0, clipped to 2.0, at"),
    "fewer": (f"{NORM} 3 tensors (", f"{NORM} 2 tensors ("),
    "fewer replicated": (f"{NORM} 3 tensors (", f"{NORM} 2 tensors ("),
}


@pytest.mark.parametrize("what", CLIPPED)
def test_ranks_that_clip_otherwise_are_told_so(world, what):
    said = [text for text, _ in world(clipped, 4, what)]
    assert all(any(word in text for word in CLIPPED[what]) or "didn't come" in text for text in said)
    assert any(all(word in text for word in CLIPPED[what]) for text in said)


def test_clipping_waits_for_a_rank_as_long_as_its_mesh_says(world):
    told = world(clipped, 4, "late")
    assert all(text and seconds < 3.5 for text, seconds in told[1:])
    assert sum("rank 0 didn't come" in text for text, _ in told) >= 1


def test_equal_clipping_raises_no_alarm(world):
    assert {text for text, _ in world(clipped, 4, "")} == {str(torch.tensor(112.0).sqrt().item())}


def many_resharded() -> str:
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu", timeout=5)
    axes.debug(check=True)
    x = {name: axes.shard(torch.ones(4, 4), "a@dp b@tp", mesh=mesh) for name in "pq"}
    with pytest.raises(DesyncError) as caught:
        axes.reshard(x, {"p": "a@dp b", "q": "a@dp b" if mesh.rank != 1 else "a b@tp"}, mesh=mesh)
    return str(caught.value)


def test_plans_of_many_tensors_that_differ_are_shown_with_what_differs(world):
    for rank, said in enumerate(world(many_resharded, 4)):
        assert "ranks have other plans" in said, rank
        assert "-> a@dp b on" in said
        assert "-> a b@tp on" in said


def sizes_on_one_rank() -> int:
    mesh, store = axes.init_mesh("tp=2", device_type="cpu", timeout=5), dist.group.WORLD.get_group_store()
    axes.debug(check=True)
    sizes = {} if mesh.rank == 0 else {"send_sizes": [2, 2], "recv_sizes": [2, 2]}
    axes.psum(torch.ones(1), "tp", mesh=mesh)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(3):
        with pytest.raises(DesyncError, match="ranks disagree"):
            axes.all_to_all(torch.ones(4, 2), "tp", 0, 0, mesh=mesh, **sizes)
    dist.barrier()
    time.sleep(0.2)
    return store.num_keys() - before


def test_no_key_is_left_where_one_rank_tells_its_sizes_and_another_none(world):
    assert world(sizes_on_one_rank, 2) == [0, 0]


def test_debug_takes_a_bool():
    with pytest.raises(AxesError, match=r"True or False; found .*yes"):
        axes.debug(check="yes")


@pytest.mark.parametrize(("word", "is_on"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_the_environment_asks_for_checks_in_the_usual_words(monkeypatch, word, is_on):
    with monkeypatch.context() as environment:
        environment.setenv("AXES_CHECK", word)
        flags.read_environment()
        assert flags.check is is_on
    flags.read_environment()


def test_a_word_that_asks_for_checks_or_not_is_an_error_where_it_says_neither():
    environment = os.environ | {"AXES_CHECK": "2"}
    run = subprocess.run(
        [sys.executable, "-c", "import axes; axes.init_mesh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "AXES_CHECK is 1 (true, yes, on) or 0 (false, no, off); found '2'" in run.stderr


# --- a rank that dies


def dying(how: str, folder: str) -> None:
    mesh, rank = prepared(), dist.get_rank()
    leaf = axes.shard(torch.ones(4, 4), "a@dp b@tp", mesh=mesh).requires_grad_()
    summed = axes.to_local(axes.rearrange(leaf, "a@dp b@tp -> a b"), grad="summed").sum()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    error: BaseException | None = None
    try:
        for _ in range(100):
            if how == "psum":
                axes.psum(torch.ones(3), ("dp", "tp"), mesh=mesh)
            elif how == "reshard":
                axes.reshard(leaf.detach(), "a@tp b")
            elif how == "waited for":
                axes.reshard(axes.reshard(leaf.detach(), "a@tp b", async_op=True), "a b@tp")
            else:
                summed.backward(retain_graph=True)
    except AxesError as caught:
        error = caught
    cause = None if error is None else type(error.__cause__).__name__
    (Path(folder) / f"{rank}").write_text(f"{type(error).__name__} from {cause}: {error}")
    time.sleep(1)  # until the others have written theirs


DIED = {
    "psum": "psum over 'dp tp' of [3] float32 failed on rank {rank}, at tests/test_check.py:",
    "reshard": "of [4, 4] float32 failed on rank {rank}, in its all_to_all over 'dp tp' of ranks 0..3, at tests/",
    "waited for": "of [4, 4] float32 failed on rank {rank}, in its all_to_all over 'dp tp' of ranks 0..3, at tests/",
    "backward": "of [4, 4] float32 failed on rank {rank}, in its reduce_scatter over 'dp tp' of ranks 0..3, at tests/",
}


@pytest.mark.parametrize("how", DIED)
def test_where_a_rank_dies_the_others_say_what_failed_and_where(world, tmp_path, how):
    with pytest.raises(AxesError, match="rank 3 of 4 was killed"):
        world(dying, 4, how, str(tmp_path))
    found = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert found, "nobody was left"
    for rank, said in found.items():
        assert said.startswith("DesyncError from RuntimeError: "), said
        assert DIED[how].format(rank=rank) in said
        assert "\n  with ranks 0..3: " in said
        assert said.count("backward: ") == (how == "backward")


# --- groups that have been ended


def ended() -> list[str]:
    mesh, told = prepared(), []
    x = axes.shard(torch.arange(16.0).view(4, 4), "a@dp b@tp", mesh=mesh)
    compiled = torch.compile(lambda x: axes.rearrange(x, "a@dp b@tp -> a b@dp"), backend="aot_eager")
    assert torch.equal(axes.unshard(compiled(x)), torch.arange(16.0).view(4, 4))
    axes.destroy_process_groups()
    whole = torch.compile(lambda x: axes.unshard(x) * 2, backend="aot_eager", fullgraph=True)
    calls = (
        lambda: axes.rearrange(x, "a@dp b@tp -> a b"),
        lambda: axes.unshard(x),
        lambda: axes.spec_of(x),
        lambda: compiled(x),
        lambda: whole(x),
    )
    for call in calls:
        with pytest.raises(MeshError) as caught:
            call()
        told.append(str(caught.value))
    y = axes.shard(torch.arange(16.0).view(4, 4), "a@dp b@tp", mesh=mesh)
    assert torch.equal(axes.unshard(compiled(y)), torch.arange(16.0).view(4, 4))
    return told


def test_after_the_end_of_the_groups_old_tensors_and_graphs_say_so_and_new_ones_work(warm):
    for told in warm(ended, 4):
        assert all(said.startswith("the process groups of this DeviceMesh have been ended") for said in told), told
