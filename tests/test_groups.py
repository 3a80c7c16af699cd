"""One communicator for one ordered list of ranks, backend and options, counted where torch keeps them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Shard, distribute_tensor

import axes
from axes import GroupOptions, MeshError


def made_by_torch() -> int:
    """Groups that torch holds in this process, the default group among them."""
    return len(c10d._world.pg_map)


# ------------------------------------------------------------------------ how many, and which


def count_groups():
    counts = {}
    before = made_by_torch()
    mesh = axes.init_mesh("pp dp cp tp", "fsdp = dp cp", "(cp tp) = ep", "all = pp dp cp tp", pp=1, dp=2, cp=2)
    counts["declared"] = made_by_torch() - before
    names = ["dp", "cp", "tp", "fsdp", "ep"]
    groups = {name: mesh.axis(name).group for name in names}
    counts["five axes"] = made_by_torch() - before
    again = axes.init_mesh("x=2 y=2 z=2", "xy = x y")
    alike = mesh.rearrange("pp dp cp tp -> outer=(pp dp) inner=(cp tp)")
    same = [
        again.axis("x").group is groups["dp"],
        again.axis("xy").group is groups["fsdp"],
        alike.axis("inner").group is groups["ep"],
        mesh["tp", "dp"].axis("tp").group is groups["tp"],
        mesh["fsdp"].device_mesh.get_group() is groups["fsdp"],
        mesh["cp", "tp"].device_mesh.get_group("cp") is groups["cp"],
        mesh.axis("all").group is dist.group.WORLD,
    ]
    counts["aliases"] = made_by_torch() - before
    one, other = axes.init_mesh("a=1 b=8"), axes.init_mesh("c=8 d=1")
    single = mesh.axis("pp").group
    same += [one.axis("a").group is single, other.axis("d").group is single, single.size() == 1]
    counts["size one"] = made_by_torch() - before
    backwards = mesh.rearrange("pp dp cp tp -> pp x=(tp cp dp)")
    counts["backwards"] = (backwards.axis("x").group.size(), made_by_torch() - before)
    return counts, same


def test_a_rank_has_one_communicator_per_ordered_layout_and_one_for_size_one(world):
    for counts, same in world(count_groups, 8):
        assert counts == {
            "declared": 0,
            "five axes": 5,
            "aliases": 5,
            "size one": 6,
            "backwards": (8, 7),
        }
        assert all(same), same


def meet_after_other_groups():
    """Ranks 0 and 2 make one group more than 1 and 3 before {0, 1} meets."""
    rank = dist.get_rank()
    if rank in (0, 2):
        axes.init_mesh("x", ranks=[0, 2]).create_groups()
    if rank == 3:
        for ranks in ([1, 3], [3, 1]):
            axes.init_mesh("x", ranks=ranks)
    if rank == 1:
        for ranks in ([1, 3], [3, 1]):
            axes.init_mesh("x", ranks=ranks)
    mesh = axes.init_mesh("dp=2 tp=2")
    value = torch.tensor([rank])
    dist.all_reduce(value, group=mesh.axis("tp").group)
    return value.item(), len(axes.process_groups())


def test_ranks_that_made_different_groups_before_still_meet(world):
    assert world(meet_after_other_groups, 4) == [(1, 3), (1, 2), (5, 3), (5, 2)]


DECLARATIONS = [
    ("dp=2 cp=2 tp=2", None),
    ("dp=4 tp=2", [7, 2, 5, 0, 1, 6, 3, 4]),
    ("x=8", [3, 1, 4, 0, 5, 2, 6, 7]),
    ("x=3 y=2", [6, 1, 3, 2, 5, 0]),
    ("x=2 y=2", range(1, 8, 2)),
]


def orders_and_collectives(declarations):
    """What collectives find on each axis, against the axis's own ranks."""
    wrong = []
    for declaration, ranks in declarations:
        mesh = axes.init_mesh(declaration, ranks=ranks)
        names = mesh.axis_names
        flat = mesh.rearrange(f"{' '.join(names)} -> all=({' '.join(reversed(names))})")
        if mesh.coordinate is None:
            continue
        for axis in [mesh.axis(name) for name in mesh.axis_names] + [flat.axis("all")]:
            group, mine = axis.group, torch.tensor([dist.get_rank()])
            gathered = [torch.empty_like(mine) for _ in range(axis.size)]
            dist.all_gather(gathered, mine, group=group)
            functional = funcol.all_gather_tensor(mine, 0, group)
            op = torch.ops._c10d_functional.all_gather_into_tensor(mine, axis.size, group.group_name)
            by_name = funcol.wait_tensor(op)
            start = torch.tensor([axis.index * 10])
            dist.broadcast(start, src=axis.ranks[0], group=group)
            found = (
                torch.cat(gathered).tolist(),
                functional.tolist(),
                by_name.tolist(),
                dist.get_process_group_ranks(group),
                [group.rank(), start.item()],
            )
            ranks_ = list(axis.ranks)
            if found != (ranks_, ranks_, ranks_, ranks_, [axis.index, 0]):
                wrong.append((declaration, axis.name, ranks_, found))
    return wrong


def test_coordinate_i_is_rank_i_of_the_group_in_every_kind_of_collective(pool):
    assert pool.run(orders_and_collectives, DECLARATIONS) == [[]] * 8


def destroy_and_use_again():
    mesh = axes.init_mesh("dp=2 tp=2")
    sums = []
    for _ in range(3):
        value = torch.tensor([dist.get_rank()])
        dist.all_reduce(value, group=mesh.axis("tp").group)
        x = distribute_tensor(torch.arange(8), mesh.device_mesh, [Shard(0), Shard(0)])
        assert (x + 1).full_tensor().tolist() == list(range(1, 9))
        sums.append(value.item())
        axes.destroy_process_groups()
        assert dist.is_initialized(), "this world isn't ours to end"
        assert len(axes.process_groups()) == made_by_torch() == 1
    return sums


def test_destroyed_groups_are_made_anew_at_the_next_use(world):
    assert world(destroy_and_use_again, 4) == [[1] * 3, [1] * 3, [5] * 3, [5] * 3]


def bound_to_a_device():
    """The default group of a job with one GPU per rank, as far as torch asks about it."""
    device, default = torch.device("cuda:0"), dist.group.WORLD
    default.bound_device_id = device
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    asked = []
    split_source = c10d._get_split_source
    c10d._get_split_source = lambda group: asked.append(group) or split_source(group)
    try:
        if dist.get_rank() < 2:
            value = torch.tensor([1])
            dist.all_reduce(value, group=mesh.axis("tp").group)
            assert value.item() == 2
            assert mesh.axis("tp").group.bound_device_id == device
    finally:
        c10d._get_split_source = split_source
    return len(asked), default.bound_device_id == device


def test_members_alone_make_a_group_even_where_torch_would_split_the_default_group(world):
    assert world(bound_to_a_device, 4) == [(0, True)] * 4


def a_second_world():
    """A world that somebody else ends and starts again, on the same store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.group.WORLD.get_group_store()
    mesh = axes.init_mesh("dp=2 tp=2")
    first = mesh.axis("tp").group
    dist.destroy_process_group()
    with pytest.raises(MeshError, match="isn't running"):
        mesh.axis("tp").group.size()
    assert axes.process_groups() == []
    assert repr(axes.process_groups()) == "[]"
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=size)
    second = mesh.axis("tp").group
    value = torch.tensor([rank])
    dist.all_reduce(value, group=second)
    return first is second, value.item(), made_by_torch()


def test_groups_of_a_world_that_ended_are_never_used_in_the_next(world):
    assert world(a_second_world, 4) == [(False, 1, 2), (False, 1, 2), (False, 5, 2), (False, 5, 2)]


# ------------------------------------------------------------------------------------- options


def options_make_groups_of_their_own():
    plain = axes.init_mesh("dp=2 tp=4")
    patient = axes.init_mesh("dp=2 tp=4", "ep = tp", options={"tp": GroupOptions(timeout=77), "dp": GroupOptions()})
    explicit = axes.init_mesh("dp=2 tp=4", options={"tp": GroupOptions("gloo")})
    timeout = patient.axis("tp").group._get_backend(torch.device("cpu")).options._timeout
    return [
        patient.axis("tp").group is not plain.axis("tp").group,
        patient.axis("ep").group is patient.axis("tp").group,
        patient.axis("dp").group is plain.axis("dp").group,
        explicit.axis("tp").group is plain.axis("tp").group,
        timeout == timedelta(seconds=77),
        plain != patient,
        plain == explicit,
        plain.device_mesh is not patient.device_mesh,
        plain.device_mesh is explicit["dp", "tp"].device_mesh,
    ]


def test_options_make_a_group_of_their_own_for_a_layout_and_all_its_names(pool):
    assert pool.run(options_make_groups_of_their_own) == [[True] * 9] * 8


def bad_options():
    cases = [
        {"tpp": GroupOptions()},
        {"tp": "gloo"},
        {"tp": GroupOptions("nonsense")},
        {"tp": GroupOptions("nccl")},
        {"tp": GroupOptions(pg_options=object())},
        {"tp": GroupOptions(timeout=5), "ep": GroupOptions(timeout=6)},
        ["tp"],
    ]
    before, texts = made_by_torch(), []
    for options in cases:
        with pytest.raises(MeshError) as caught:
            axes.init_mesh("dp=2 tp=4", "ep = tp", options=options)
        texts.append(str(caught.value))
    fine = axes.init_mesh("dp=8 tp=1", "ep = tp", options={"tp": GroupOptions(timeout=5)})
    with pytest.raises(MeshError, match="algebra alone"):
        axes.Mesh("dp=2 tp=4").axis("tp").group.size()
    return texts, fine.axis("tp").group.size(), made_by_torch() - before


def test_bad_options_are_refused_before_anything_is_made(pool):
    for texts, size, made in pool.run(bad_options):
        assert "did you mean 'tp'" in texts[0]
        assert "found 'gloo'" in texts[1]
        assert "no backend 'nonsense'" in texts[2]
        assert "no backend 'nccl'" in texts[3] or "doesn't serve 'cpu'" in texts[3]
        assert "gloo takes no pg_options" in texts[4]
        assert "'tp' and 'ep' are the same ranks" in texts[5]
        assert "timeout=0:00:05 and timeout=0:00:06" in texts[5]
        assert "mapping" in texts[6]
        assert size == 1
        assert made <= 1


class BackendOptions:
    """As the options of a backend are: public fields, one of them nested, and one torch writes."""

    class Config:
        def __init__(self, ctas: int):
            self.ctas = ctas

    def __init__(self, priority: bool, ctas: int, group_name: str):
        self.priority, self.config, self.group_name = priority, self.Config(ctas), group_name


@given(st.tuples(st.booleans(), st.integers(1, 3)), st.tuples(st.booleans(), st.integers(1, 3)))
def test_options_are_equal_if_and_only_if_their_content_is(one, other):
    left = GroupOptions("nccl", BackendOptions(*one, "written by torch"), 5)
    right = GroupOptions("nccl", BackendOptions(*other, "and again"), timedelta(seconds=5))
    assert (left == right) == (one == other) == (left.text == right.text)
    assert left != right or hash(left) == hash(right)


@pytest.mark.parametrize("timeout", [0, -1, True, "5", float("nan"), float("inf"), [], timedelta(0)])
def test_a_timeout_is_a_positive_time(timeout):
    with pytest.raises(MeshError, match="positive timedelta or number of seconds"):
        GroupOptions(timeout=timeout)


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.nn.UninitializedParameter()])
def test_tensors_are_no_options_of_a_backend(tensor):
    with pytest.raises(
        MeshError, match=r"GroupOptions.pg_options is the options object of a backend, such as .*; found "
    ):
        GroupOptions(pg_options=tensor)


def test_options_without_a_backend_object_pickle():
    options = GroupOptions("gloo", timeout=3)
    assert pickle.loads(pickle.dumps(options)) == options


# ------------------------------------------------------------------------------------ listing


def listing():
    mesh = axes.init_mesh("dp=2 tp=2", "ep = tp")
    for name in ("tp", "tp", "ep", "dp"):
        mesh.axis(name).group.size()
    found = axes.process_groups()
    assert [str(info) for info in found] == list(map(str, axes.process_groups()))
    assert repr(found) == "\n".join(map(repr, found)) == "\n".join(map(str, found))
    return [(info.names, list(info.ranks), info.asked, info.origin, str(info)) for info in found]


def test_the_groups_that_exist_are_listed_with_who_asked_for_them(world):
    default, tp, dp = world(listing, 4)[3]
    assert default[:4] == ((), [0, 1, 2, 3], 0, "default")
    assert tp == (("tp", "ep"), [2, 3], 3, "made", "tp, ep: ranks 2, 3  gloo  made, asked for 3 times")
    assert dp[:4] == (("dp",), [1, 3], 1, "made")


def outside():
    mesh = axes.init_mesh("dp=2 tp=2", ranks=[0, 1, 2, 3])
    mesh.create_groups()
    if dist.get_rank() < 4:
        return mesh.coordinate["tp"], mesh.axis("tp").group.size()
    with pytest.raises(MeshError, match=r"rank \d isn't one of the ranks"):
        mesh.axis("tp").group.size()
    with pytest.raises(MeshError, match="world has 8 ranks"):
        axes.init_mesh("dp", ranks=[7, 8])
    with pytest.raises(MeshError, match="more than once"):
        axes.init_mesh("dp", ranks=[7, 7])
    with pytest.raises(MeshError, match="sequence of distinct integers"):
        axes.init_mesh("dp", ranks=7)
    return mesh.coordinate, None


def test_a_rank_outside_the_mesh_takes_no_part(world):
    found = world(outside, 8)
    assert found[:4] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert found[4:] == [(None, None)] * 4


# ----------------------------------------------------------------------- starting the world

WITHOUT_A_LAUNCHER = """
import os, torch, torch.distributed as dist, axes
os.environ["RANK"] = "0"
try:
    axes.init_mesh("dp", device_type="cpu")
except axes.MeshError as error:
    print(error)
del os.environ["RANK"]
for bad in ("cuda:0", 3, "nonsense"):
    try:
        axes.init_mesh("dp", device_type=bad)
    except axes.MeshError as error:
        print(error)
mesh = axes.init_mesh("dp tp", tp=1, device_type="cpu")
x = torch.ones(2)
dist.all_reduce(x, group=mesh.axis("dp").group)
print(mesh.shape, mesh.coordinate, x.tolist(), len(axes.process_groups()))
axes.destroy_process_groups()
print(dist.is_initialized(), axes.process_groups())
print(axes.init_mesh("dp", device_type="cpu").axis("dp").group.size())
"""


def clean_environment() -> dict[str, str]:
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    return {name: value for name, value in os.environ.items() if name not in launcher}


def test_without_a_launcher_a_script_runs_as_a_world_of_one():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_LAUNCHER],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the launcher set RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT; torchrun sets all of them",
        "device_type is a name without an index, such as 'cuda' or 'cpu'; found 'cuda:0'",
        "device_type is a name without an index, such as 'cuda' or 'cpu'; found 3",
        "torch.distributed has no backend for device type 'nonsense'",
        "{'dp': 1, 'tp': 1} {'dp': 0, 'tp': 0} [1.0, 1.0] 1",
        "False []",
        "1",
    ]


def devices_chosen():
    """What `init_mesh` binds to where the machine has an accelerator, and this world runs gloo."""
    current = torch.accelerator.current_accelerator
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    try:
        here = axes.init_mesh("dp").binding.device_type
        dist.destroy_process_group()
        with axes.simulate(8):
            simulated = axes.init_mesh("dp").binding.device_type
    finally:
        torch.accelerator.current_accelerator = current
    return here, simulated


def test_a_mesh_is_bound_to_the_accelerator_where_the_running_world_serves_it(world):
    assert world(devices_chosen, 2) == [("cpu", "cuda")] * 2


def a_collective_of_torch_to_which_a_rank_doesnt_come():
    store = dist.group.WORLD.get_group_store()
    axes.init_mesh("dp", device_type="cpu", timeout=3)
    if dist.get_rank() == 1:
        store.wait(["ended"], timedelta(seconds=60))
        return ""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("ended", "")


def test_the_limit_of_a_mesh_is_that_of_the_default_group_whoever_made_it(world):
    assert "Timed out waiting 3000ms" in world(a_collective_of_torch_to_which_a_rank_doesnt_come, 2)[0]


def started_from_the_environment():
    """As under torchrun: no world yet, but its environment."""
    dist.destroy_process_group()
    mesh = axes.init_mesh("dp", device_type="cpu", timeout=33)
    default = dist.group.WORLD
    value = torch.tensor([dist.get_rank()])
    dist.all_reduce(value, group=mesh.axis("dp").group)
    timeout = default._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    axes.destroy_process_groups()
    return value.item(), timeout, dist.is_initialized()


STARTS = {
    "axes.init_mesh('dp=1', device_type='cpu')": "False",
    "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); axes.init_mesh('dp=1')": "True",
    "axes.init_mesh('dp=1', device_type='cpu'); axes.destroy_process_groups()": "False",
}


@pytest.mark.parametrize("start", STARTS)
def test_a_world_that_init_mesh_started_ends_with_the_program(start):
    """What torch leaves open when a process ends has threads, and these end some processes with an abort."""
    code = "import atexit, torch.distributed as dist, axes; atexit.register(lambda: print(dist.is_initialized())); "
    done = subprocess.run([sys.executable, "-c", code + start], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [STARTS[start]]


def test_init_mesh_starts_the_world_from_the_launchers_environment(world):
    assert world(started_from_the_environment, 2) == [(1, 33.0, False)] * 2
