"""Ranks that disagree: in the mesh that they declare, in groups, in operations under `axes.debug(check=True)`; and ranks that
don't come, that die, that use groups which have ended. All ranks are told what differs, and nothing hangs.

A program of operations here is a list of steps, each of which communicates. In a pair of programs that differ one rank
runs the other one; both end with a sum over all ranks, as a step of training does.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import axes
from axes import DesyncError, GroupOptions
from tests.common import case, error_of, waited

# --- meshes and groups ----------------------------------------------------------------------------

LIMIT = 3.0
"""Seconds that ranks wait for one that doesn't come."""

PATIENT = 30.0
"""Seconds that they wait where all come: who is told within them is told at once."""


class Odd:
    """Ranks that can't be listed."""

    def __iter__(self) -> Iterator[int]:
        raise axes.MeshError("these ranks can't be listed")


def mesh_of(rank: int, declaration: str = "dp=2 tp=2", **how: Any) -> axes.Mesh:
    return axes.init_mesh(declaration, **{"device_type": "cpu", "timeout": PATIENT, **how})


def group_of(rank: int, *names: str) -> list[int]:
    """The sizes of groups that nobody has made before."""
    mesh = mesh_of(rank, timeout=LIMIT)
    return [mesh.axis(name).group.size() for name in names]


def apart(rank: int) -> int:
    """Meshes of few ranks, which others never see."""
    for _ in range(rank):
        axes.init_mesh("x", ranks=[rank], device_type="cpu")
    if rank >= 2:
        for ranks in ([2, 3], [3, 2]):
            axes.init_mesh("dp", ranks=ranks, device_type="cpu")
    return mesh_of(rank).shape["tp"]


def made_beforehand(rank: int) -> list[int]:
    mesh = mesh_of(rank)
    mesh.create_groups("tp", "dp")
    return [mesh.axis(name).group.size() for name in (("tp", "dp") if rank in (0, 3) else ("dp", "tp"))]


def other_order(rank: int) -> Any:
    meshes = [axes.init_mesh("dp", ranks=ranks, device_type="cpu", timeout=PATIENT) for ranks in ([0, 1], [1, 0])]
    return rank < 2 and meshes[rank].axis("dp").group


def of_one(**how: Any) -> Callable[[int], Any]:
    return lambda rank: mesh_of(rank, **(how if rank == 1 else {}))


Told = tuple[str, ...]
ALONE = "DesyncError", "rank 1 can't take part in"

DIFFER: dict[str, tuple[Callable[[int], Any], tuple[Told, ...]]] = {
    # what each rank does; and what ranks 0, 1, 2, 3 are told in so many words; a single one is for all
    "declaration": (lambda r: mesh_of(r, {1: "tp=2 dp=2", 2: "dp=4 tp=1"}.get(r, "dp=2 tp=2")), (("DesyncError", "dp=2 tp=2", "tp=2 dp=2", "dp=4 tp=1", "ranks 0..3:\n  rank "),)),
    "options": (lambda r: mesh_of(r, options={"tp": GroupOptions(timeout=30 + r // 3)}), (("DesyncError", "options[tp]: timeout=0:00:30", "options[tp]: timeout=0:00:31"),)),
    "lanes": (lambda r: mesh_of(r, options={"tp": GroupOptions(lane=f"lane{r // 3}")}), (("DesyncError", "lane=lane0", "lane=lane1"),)),
    "order of ranks": (lambda r: mesh_of(r, ranks=[0, 1, 3, 2] if r == 3 else range(4)), (("DesyncError", "ranks 0..3", "ranks 0, 1, 3, 2"),)),
    "size": (of_one(declaration="dp=3 tp=2"), ((*ALONE, "it raised SizeError"), ("SizeError",), ALONE, ALONE)),
    "device": (of_one(device_type="nonsense"), ((*ALONE, "it raised MeshError: "), ("MeshError", "for which torch.distributed has a backend; found 'nonsense'"), ALONE, ALONE)),
    "timeout": (of_one(timeout=-1), (ALONE, ("MeshError", "timeout is a positive timedelta"), ALONE, ALONE)),
    "ranks that fail": (of_one(ranks=Odd()), (ALONE, ("MeshError", "ranks is a sequence of distinct integers; found"), ALONE, ALONE)),
    "an option": (of_one(options={"dp": 3}), (ALONE, ("MeshError", "options['dp'] is a GroupOptions"), ALONE, ALONE)),
    "overlapping universes": (lambda r: axes.init_mesh("dp", ranks=range(4) if r < 2 else range(1, 4), device_type="cpu", timeout=LIMIT), (("DesyncError", "init_mesh over ranks 0..3", "init_mesh over ranks 1..3"),)),
    "ranks without itself": (lambda r: r < 3 and axes.init_mesh("dp", ranks=range(3 - r // 2), device_type="cpu", timeout=LIMIT), (("DesyncError", "rank 2 isn't a member of what it declared last, init_mesh over ranks 0, 1"),) * 2 + ((), ())),
    "one never comes": (lambda r: r != 1 and mesh_of(r, timeout=LIMIT), (("DesyncError", "rank 1 didn't come to init_mesh over ranks 0..3 within 3 s", "rank 1 hasn't been seen"), (), *[("DesyncError", "rank 1 didn't come")] * 2)),
    "one never comes to a group": (lambda r: group_of(r, *(["tp"] if r < 3 else [])), ((), (), ("DesyncError", "rank 3 didn't come to the group of ranks 2, 3 ('tp') within 3 s", "rank 3 was last seen when it passed init_mesh over ranks 0..3"), ())),
    "opposite orders": (lambda r: group_of(r, *(("tp", "dp") if r in (0, 3) else ("dp", "tp"))), (("DesyncError", "didn't come to the group of ranks ", "within 3 s", "mesh.create_groups"),)),
    "order of members": (other_order, (("DesyncError", "ranks 0, 1 in this order", "ranks 1, 0 in this order"),) * 2 + ((), ())),
    "a shard of other dims": (lambda r: axes.from_local(torch.ones((2,) * (3 if r == 3 else 2)), "a@tp b", mesh=mesh_of(r, "tp=4", timeout=LIMIT)), (*[("DesyncError", "rank 3 was last seen when it raised in axes.from_local 'a@tp b': the spec 'a@tp b' has 2 dims, the tensor 3")] * 3, ("ShardingError",))),
    "a shard with another spec": (lambda r: axes.from_local(torch.ones(2, 2), "a b@tp" if r == 3 else "a@tp b", mesh=mesh_of(r, "tp=4")), (*[("DesyncError", "axes.from_local 'a@tp b': what rank 3 told are")] * 3, ("DesyncError", "axes.from_local 'a b@tp': what ranks 0, 1, 2 told are sizes of another call's tensors"))),
    # no false alarms
    "the same error on all": (lambda r: mesh_of(r, "dp=3 tp=2"), (("SizeError",),)),
    "other meshes before": (apart, ((),)),
    "groups made beforehand": (made_beforehand, ((),)),
}  # fmt: skip
# fmt: off
WAITED = ("overlapping universes", "ranks without itself", "one never comes", "one never comes to a group", "a shard of other dims", "opposite orders")
# fmt: on


APART = (*WAITED, "order of members")
"""In worlds of their own: a rank that leaves a call out is told of it at its next one."""


def differing_meshes(names: list[str]) -> list[str]:
    rank, patient, told = dist.get_rank(), dist.new_group(timeout=timedelta(minutes=1)), []
    for name in names:
        act = DIFFER[name][0]
        with case(name):
            told.append(error_of(lambda act=act: act(rank)))
            dist.barrier(patient)
    if names[0] not in APART:
        assert axes.psum(torch.ones(1), "x", mesh=mesh_of(rank, "x=4")).item() == 4, "the world is as usable as before"
    return told


@pytest.mark.parametrize(
    "names", [[name for name in DIFFER if name not in APART], *([name] for name in APART)], ids=lambda names: names[0]
)
def test_ranks_that_differ_in_meshes_and_groups_are_told_all_sides(world, names):
    by_rank = world(differing_meshes, 4, names, timeout=240)
    for name, column in zip(names, zip(*by_rank, strict=True), strict=True):
        wanted = DIFFER[name][1]
        for rank, said in enumerate(column):
            words = wanted[rank] if len(wanted) > 1 else wanted[0]
            with case(f"{name}, on rank {rank}, which is told {said!r}"):
                assert said.startswith(words[0]) if words else said == "nothing"
                missing = [word for word in words if word not in said]
                assert len(missing) <= (name == "declaration"), "two sides are enough"
                assert name in WAITED or "within" not in said, "told at once"


def started_here(how: str) -> str:
    """What a rank is told of a world that `init_mesh` starts."""
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    if how == "no store":
        with socket.create_server(("127.0.0.1", 0)) as found:
            os.environ["MASTER_PORT"] = str(found.getsockname()[1])
        return error_of(lambda: mesh_of(rank, "dp", timeout=0.5))
    return error_of(lambda: mesh_of(rank, "dp=3", timeout=-1 if rank == 1 else PATIENT))


def test_a_world_that_init_mesh_starts_is_told_as_well(world):
    for rank, told in enumerate(world(started_here, 3, "one errs")):
        assert told.startswith("MeshError: timeout" if rank == 1 else "DesyncError: rank 1 can't take part in"), told
    said = world(started_here, 1, "no store")[0]
    # torch refuses, or its answer is waited for no longer: whichever comes first.
    assert re.search("the job's store (can't be reached|doesn't answer) in the start of torch.distributed: ", said), (
        said
    )


def ranks_of_unlike_nodes() -> tuple[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() else "1"
    told = error_of(lambda: mesh_of(0, "dp=4"))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = [mesh_of(0, "dp=4", ranks_per_node=1).ranks_per_node, mesh_of(0, "dp=4").ranks_per_node]
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    return told, [*found, mesh_of(0, "dp=4").ranks_per_node]


def test_the_launcher_says_how_many_ranks_a_node_has(world):
    for told, nodes in world(ranks_of_unlike_nodes, 4):
        assert "ranks_per_node=1" in told
        assert "ranks_per_node=2" in told
        assert nodes == [1, 2, None]


# --- operations ------------------------------------------------------------------------------------

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
WHOLE = ("reshard", "expression", "source")
"""Steps of all ranks."""
END: Step = ("psum", ("dp", "tp"), (3,), torch.float32)


HOWS = {
    **dict.fromkeys((*NAMED, "gradient"), ("dp", "tp")),
    "source": (0, 1, 2, 3),
    "reshard": SPECS[1:],
    "expression": EXPRESSIONS,
}
"""Over which axis a step is, or from which rank, to which spec, by which expression."""


def drawn(pick: random.Random, kinds: Sequence[str] = ()) -> Step:
    """A step of one of these kinds, or of any: one by name as often as all others together."""
    what = pick.choice(kinds or pick.choice((NAMED, [*HOWS][len(NAMED) :])))
    return what, pick.choice(HOWS[what]), pick.choice(EVEN), pick.choice(DTYPES)


KINDS = ["operation", "axis", "shape", "dtype", "reshard", "expression", "gradient", "source", "skipped", "order"]


def differing(number: int) -> tuple[str, int, Program, Program]:
    """What differs, on which rank, and what the others and it run."""
    pick = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    before = tuple(drawn(pick) for _ in range(pick.randrange(2)))
    step = drawn(pick, NAMED if kind in ("operation", "axis") else [kind] if kind in HOWS else ())
    ours: Program = (step,)
    at = {"operation": 0, "shape": 2, "dtype": 3}.get(kind, 1)
    choices = {0: NAMED, 1: HOWS[step[0]], 2: EVEN, 3: DTYPES}[at]
    theirs: Program = ((*step[:at], pick.choice([each for each in choices if each != step[at]]), *step[at + 1 :]),)
    if kind == "gradient":
        theirs = (("psum", *step[1:]),)
    if kind == "skipped":
        theirs = ()
    if kind == "order":
        second = step
        while second == step:
            # Steps over two axes may go in any order: nobody waits in turn.
            one_axis = step[0] in NAMED or step[0] == "gradient"
            second = (pick.choice(NAMED), step[1], *step[2:3], pick.choice(DTYPES)) if one_axis else drawn(pick, WHOLE)
        ours, theirs = (step, second), (second, step)
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
    prepared()  # with more time, in which all ranks begin
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


@pytest.mark.parametrize("numbers", [range(10), pytest.param(range(10, 100), marks=pytest.mark.full)], ids=str)
def test_programs_that_differ_on_one_rank_are_told_so_on_every_rank(world, numbers):
    every = world(told_apart, 4, numbers, timeout=600)
    for each in zip(*every, strict=True):
        number = each[0][0]
        assert all(said for _, _, said in each), (differing(number), each)
        here = [said for _, _, said in each if "test_desync.py:" in said]
        assert len(here) == 4, (differing(number), each)


def both_sides() -> list[str]:
    """What ranks are told that differ in one call, in how they clip, and in one of several tensors."""
    mesh, rank = prepared(), dist.get_rank()
    patient = dist.new_group(timeout=timedelta(minutes=1))
    weight = torch.nn.Parameter(axes.shard(torch.ones(4, 4), "a@dp b@tp", mesh=mesh))
    weight.grad = axes.shard(torch.full((4, 4), 2.0), "a@dp b@tp", mesh=mesh)
    many = {name: weight.detach() for name in "pq"}
    found = []
    for call in (
        lambda: (axes.pmax if rank == 3 else axes.psum)(torch.ones(3), "tp", mesh=mesh),
        lambda: axes.nn.clip_grad_norm_([weight], 1.0, norm_type=2.0 if rank < 2 else 3.0),
        lambda: axes.reshard(many, {"p": "a@dp b", "q": "a@dp b" if rank != 1 else "a b@tp"}, mesh=mesh),
    ):
        with axes.debug(check=True):
            found.append(error_of(call))
            dist.barrier(patient)
    return found


def test_what_differs_is_shown_with_both_sides_and_their_lines(world):
    called, clipped, many = zip(*world(both_sides, 4), strict=True)
    for said in called[2:]:
        assert said.startswith("DesyncError: ranks disagree in operation 1 of ranks 2, 3:\n  rank "), said
        for line in ("rank 2: psum over 'tp' of [3] float32", "rank 3: pmax over 'tp' of [3] float32"):
            assert f"\n  {line}, at tests/test_desync.py:" in said
    assert any("of order 2.0, clipped to 1.0'" in said and "of order 3.0, clipped" in said for said in clipped)
    assert all("order" in said or "didn't come" in said for said in clipped), clipped
    for said in many:
        assert all(word in said for word in ("ranks disagree in operation 1", "-> a@dp b)", "-> a b@tp)")), said


# --- no false alarm


def same(pick: random.Random) -> list[Step]:
    """A program of all ranks, some steps of which are of one line of ranks alone."""
    steps: list[Step] = []
    for _ in range(pick.randrange(1, 5)):
        kind = pick.choice(("named", "whole", "uneven", "line", "orders", "sizes"))
        if kind in ("named", "whole"):
            steps.append(drawn(pick, NAMED if kind == "named" else (*WHOLE, "gradient")))
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


@pytest.mark.parametrize("numbers", [range(60), pytest.param(range(60, 300), marks=pytest.mark.full)], ids=str)
def test_equal_programs_raise_no_alarm_and_leave_no_key(world, numbers):
    assert world(undisturbed, 4, numbers, timeout=300) == [0] * 4


# --- the flag


def flagged() -> list[str]:
    """What ranks are told that ask for something else."""
    prepared()
    mesh, odd, told = mesh_of(0, timeout=3), dist.get_rank() == 2, []
    patient = dist.new_group(timeout=timedelta(minutes=1))

    def attempt(call: Callable[[], Any]) -> None:
        told.append(error_of(call))
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
        assert "rank 2: axes.debug(check=True), at tests/test_desync.py:" in call
        assert "axes.debug(check=False), at tests/test_desync.py:" in call
        assert rank == 3 or early == "nothing"
        assert "axes.debug, which all ranks of the job call" in alone
        assert after == "nothing"
    assert "rank 2 didn't come to operation 1 of ranks 2, 3 within 3 s" in found[3][2]
    assert "rank 2 has left the block of axes.debug(check=True), at tests/test_desync.py:" in found[3][2]


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
            else:
                summed.backward(retain_graph=True)
    except axes.AxesError as caught:
        error = caught
    cause = None if error is None else type(error.__cause__).__name__
    (Path(folder) / f"{rank}").write_text(f"{type(error).__name__} from {cause}: {error}")
    waited(lambda: len([*Path(folder).iterdir()]) == 3, 1)  # until the others have written theirs


DIED = {
    "psum": "psum over 'dp tp' of [3] float32 failed on rank {rank}, at tests/test_desync.py:",
    "reshard": "of [4, 4] float32 failed on rank {rank}, at tests/",
    "backward": "of [4, 4] float32 failed on rank {rank}, at tests/",
}


@pytest.mark.parametrize("how", DIED)
def test_where_a_rank_dies_the_others_say_what_failed_and_where(world, tmp_path, how):
    with pytest.raises(axes.AxesError, match="rank 3 of 4 was killed"):
        world(dying, 4, how, str(tmp_path))
    found = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert found, "nobody was left"
    for rank, said in found.items():
        assert said.startswith("DesyncError from RuntimeError: "), said
        assert DIED[how].format(rank=rank) in said
        assert "\n  with ranks 0..3: " in said
        assert said.count("backward: ") == (how == "backward")


class Broken(TorchDispatchMode):
    """A backend that fails."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError("Connection reset by peer")
        return func(*args, **(kwargs or {}))


def failed_apart() -> list[str]:
    """What rank 0 is told of a failure that it has alone, and all ranks of one that all have."""
    mesh, told = prepared(), []
    for failing in (dist.get_rank() == 0, True):
        with Broken() if failing else contextlib.nullcontext():
            told.append(error_of(lambda: axes.psum(torch.ones(1), "dp", mesh=mesh)) if failing else "")
        dist.barrier()
    return told


def test_a_failure_of_one_rank_alone_isnt_counted_at_the_next_one(world):
    for rank, (alone, common) in enumerate(world(failed_apart, 4)):
        assert ("\n  rank 2 didn't come to the roll call after psum over 'dp' of [1] float32 failed" in alone) == (
            rank == 0
        )
        assert "psum over 'dp' of [1] float32 failed on rank" in common
        assert "didn't come" not in common


def not_connected() -> str:
    """What a rank is told where no member of a group connects, the last one later than the others report it."""
    mesh = mesh_of(0)

    def making(*_: Any, **__: Any) -> None:
        time.sleep(2 * (dist.get_rank() == 3))
        raise RuntimeError(f"refused on {dist.get_rank()}")

    dist.distributed_c10d._new_process_group_helper = making
    return error_of(lambda: axes.psum(torch.ones(1), ("tp", "dp"), mesh=mesh))


def test_a_rank_that_fails_to_connect_after_the_others_is_told_its_own_error(world):
    for rank, said in enumerate(world(not_connected, 4)):
        assert f"failed on rank {rank}, in connecting: refused on {rank}" in said
        assert ("rank 3 didn't come to the roll call of the group of ranks" in said) == (rank != 3), said


def connected_late(folder: str, fails: bool) -> str:
    """What ranks say that make a group of which rank 3 connects last, or can't; each has connected before it says it."""
    mesh, real, rank = mesh_of(0), dist.distributed_c10d._new_process_group_helper, dist.get_rank()
    transposed = mesh.define("all = tp dp").axis("all")

    def making(*args: Any, **keywords: Any) -> Any:
        made = real(*args, **keywords)
        if rank == 3:
            time.sleep(1)
            if fails:
                raise RuntimeError("Connection closed by peer")
        Path(folder, str(rank)).touch()
        return made

    dist.distributed_c10d._new_process_group_helper = making
    said = error_of(lambda: transposed.group)
    return f"{said} {sorted(path.name for path in Path(folder).iterdir())}"


def test_a_group_is_made_when_all_its_members_are_connected(world, tmp_path):
    # A rank that went on before could end, and cut the connections of one that is still connecting.
    for said in world(connected_late, 4, str(tmp_path), False):
        assert said == "nothing ['0', '1', '2', '3']"


def test_ranks_that_have_connected_are_told_of_one_that_cant(world, tmp_path):
    for rank, said in enumerate(world(connected_late, 4, str(tmp_path), True)):
        assert "rank 3: failed on rank 3, in connecting: Connection closed by peer" in said
        assert "ranks disagree in the roll call of the group of ranks 0, 2, 1, 3" in said, (rank, said)


def waiting() -> tuple[list[str], int]:
    """The warnings on a rank that waits for rank 3, and how often it has read from the store."""
    real, read = dist.Store.get, []
    dist.Store.get = lambda store, key: (read.append(key), real(store, key))[1]  # type: ignore[method-assign]
    time.sleep(33 if dist.get_rank() == 3 else 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mesh_of(0, timeout=90)
    return [str(each.message) for each in said], len(read)


@pytest.mark.full
def test_of_ranks_that_wait_one_warns_for_whom_and_they_read_little(world):
    said, read = zip(*world(waiting, 4), strict=True)
    (warning,) = [text for texts in said for text in texts]
    assert re.match(r"rank 3 didn't come to init_mesh over ranks 0\.\.3 for 30 s so far:\n  rank 3 ", warning)
    assert max(read) <= 4


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
        with pytest.raises((axes.MeshError, torch._dynamo.exc.TorchDynamoException)) as caught:
            call()
        told.append(str(caught.value))
    y = axes.shard(torch.arange(16.0).view(4, 4), "a@dp b@tp", mesh=mesh)
    assert torch.equal(axes.unshard(compiled(y)), torch.arange(16.0).view(4, 4))
    return told


def test_after_the_end_of_the_groups_old_tensors_and_graphs_say_so_and_new_ones_work(warm):
    for told in warm(ended, 4):
        assert all("the process groups of this DeviceMesh have been ended" in said for said in told), told
