"""Process groups and torch's device meshes: one communicator for one ordered list of ranks, backend and options."""

from __future__ import annotations

import copy
import pickle
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import axes
from axes import GroupOptions, Mesh
from tests.common import case, error_of

WHOLE = torch.arange(64.0).view(8, 8)
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]


def made_by_torch() -> int:
    """Groups that torch holds in this process, the default group among them."""
    return len(c10d._world.pg_map)


# ------------------------------------------------------------------------ how many, and which


def how_many():
    axes.destroy_process_groups()
    counts, before = {}, made_by_torch()
    mesh = axes.init_mesh("pp dp cp tp", "fsdp = dp cp", "(cp tp) = ep", "all = pp dp cp tp", pp=1, dp=2, cp=2)
    counts["declared"] = made_by_torch() - before
    groups = {name: mesh.axis(name).group for name in ("dp", "cp", "tp", "fsdp", "ep")}
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
    single = mesh.axis("pp").group
    same += [axes.init_mesh("a=1 b=8").axis("a").group is single, single.size() == 1]
    counts["size one"] = made_by_torch() - before
    backwards = mesh.rearrange("pp dp cp tp -> pp x=(tp cp dp)")
    counts["backwards"] = (backwards.axis("x").group.size(), made_by_torch() - before)
    return counts, same


def test_a_rank_has_one_communicator_per_ordered_layout_and_one_for_size_one(pool):
    for counts, same in pool.run(how_many):
        assert counts == {"declared": 0, "five axes": 5, "aliases": 5, "size one": 6, "backwards": (8, 7)}
        assert all(same), same


def meet_after_other_groups():
    """Ranks 0 and 2 make one group more than 1 and 3 before {0, 1} meets."""
    rank = dist.get_rank()
    axes.destroy_process_groups()
    if rank in (0, 2):
        axes.init_mesh("x", ranks=[0, 2]).create_groups()
    for ranks in ([1, 3], [3, 1]) if rank in (1, 3) else ():
        axes.init_mesh("x", ranks=ranks)
    tp = axes.init_mesh("dp=2 tp=2", ranks=range(4)).axis("tp") if rank < 4 else None
    sums = []
    for _ in range(2 if tp else 0):
        value = torch.tensor([rank])
        dist.all_reduce(value, group=tp.group)
        sums.append((value.item(), len(axes.process_groups())))
        axes.destroy_process_groups()
        assert len(axes.process_groups()) == made_by_torch() == 1, "this world isn't ours to end"
    return sums


def test_ranks_that_made_different_groups_before_still_meet_and_destroyed_groups_are_made_anew(pool):
    found = pool.run(meet_after_other_groups)
    assert found[:4] == [[(1, 3), (1, 2)], [(1, 2), (1, 2)], [(5, 3), (5, 2)], [(5, 2), (5, 2)]]


def bound_to_a_device():
    """The default group of a job with one GPU per rank, as far as torch asks about it."""
    device, default = torch.device("cuda:0"), dist.group.WORLD
    default.bound_device_id = device
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    if dist.get_rank() < 2:  # torch would split the default group, which takes all of its ranks
        assert axes.psum(torch.ones(1), "tp", mesh=mesh).item() == 2
        assert mesh.axis("tp").group.bound_device_id == device
    assert default.bound_device_id == device


def a_second_world():
    """A world that somebody else ends and starts again, on the same store."""
    bound_to_a_device()
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.get_group_store()
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    first = mesh.axis("tp").group
    dist.destroy_process_group()
    assert "isn't running" in error_of(lambda: mesh.axis("tp").group.size())
    assert axes.process_groups() == []
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    second = mesh.axis("tp").group
    value = torch.tensor([rank])
    dist.all_reduce(value, group=second)
    dist.destroy_process_group()
    started = axes.init_mesh("dp tp=2", device_type="cpu", timeout=33)  # from the environment, as under torchrun
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    axes.psum(torch.ones(1), "dp", mesh=started)
    started.abort()
    return first is second, value.item(), timeout, dist.is_initialized(), str(axes.process_groups())


def test_members_alone_make_a_group_and_no_group_outlives_its_world(world):
    found = world(a_second_world, 4)
    assert found == [(False, total, 33.0, False, "[]") for total in (1, 1, 5, 5)]


# ------------------------------------------------------------------------------------- options and lanes

PATIENT = GroupOptions(timeout=77)


def options_make_groups_of_their_own():
    axes.destroy_process_groups()
    plain = axes.init_mesh("dp=2 tp=4", "ep = tp")
    patient = axes.init_mesh("dp=2 tp=4", "ep = tp", options={"tp": PATIENT, "dp": GroupOptions()})
    explicit = axes.init_mesh("dp=2 tp=4", "ep = tp", options={"tp": GroupOptions("gloo")})
    named = axes.init_mesh("x=2 y=4", options={"y": PATIENT})
    laned = axes.init_mesh("dp=2 tp=4", "ep = tp", options={"ep": GroupOptions(lane="ep")})
    adopted = Mesh.from_device_mesh(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")))
    for name in ("all", "dp"):
        mesh = axes.init_mesh("dp=2 tp=4", "all = dp tp", options={name: GroupOptions(timeout=44)})
        axes.psum(torch.ones(1), ("dp", "tp"), mesh=mesh)
    wide = [i for i in axes.process_groups() if len(i.ranks) == 8 and i.options.timeout == timedelta(seconds=44)]
    groups = {mesh: mesh.axis("tp").group for mesh in (plain, patient, laned)}
    checks = {
        "options": groups[patient] is not groups[plain] and patient.axis("ep").group is groups[patient],
        "no options": patient.axis("dp").group is plain.axis("dp").group,
        "the default said": explicit.axis("tp").group is groups[plain] and explicit == plain != patient,
        "they arrive": groups[patient]._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77),
        "lane": laned.axis("ep").group is groups[laned] is not groups[plain],
        "lane of a device mesh": laned["ep"].device_mesh.get_group() is laned.axis("ep").group,
        "refused": "Give the axes of one of the meshes other names" in error_of(lambda: axes.ones("a@tp", a=4, mesh=patient)),
        "lane told": any("lane=ep" in str(i) and {*i.names} == {"ep", "tp"} for i in axes.process_groups()),
        "psum on a lane": axes.psum(torch.ones(1), ("dp", "ep"), mesh=laned).item() == 8,
        "a product": len(wide) == 1,
        "device meshes": plain.device_mesh is explicit["dp", "tp"].device_mesh,
        "sub-mesh": patient["dp"].device_mesh is plain["dp"].device_mesh,
        "pickled": pickle.loads(pickle.dumps(named.device_mesh)) == copy.copy(named.device_mesh) == named.device_mesh,
        "adopted": Mesh.from_device_mesh(named.device_mesh["y"]).axis("y").group is groups[patient],
        "adopted from torch": adopted.device_mesh == plain.device_mesh,
    }  # fmt: skip
    return [name for name, holds in checks.items() if not holds]


def test_options_and_lanes_make_groups_and_device_meshes_of_their_own(pool):
    assert pool.run(options_make_groups_of_their_own) == [[]] * 8


def counts():
    """By group, whether it has options, and how many collectives it has had. (gloo doesn't count gathers.)"""
    found = {info.group.group_name: info.options.timeout is not None for info in axes.process_groups()}
    return {
        name: (own, c10d._resolve_process_group(name)._get_sequence_number_for_group()) for name, own in found.items()
    }


def backward(mesh):
    w = axes.shard(WHOLE, "i@tp j", mesh=mesh).requires_grad_()
    x = axes.shard(WHOLE, "b@dp i", mesh=mesh)
    y = axes.einsum(x, axes.reshard(w, "i j@tp"), "b i, i j@tp -> b j@tp")
    y.square().sum().full_tensor().backward()
    w.grad.full_tensor()


def region(mesh):
    fn = axes.shard_map(lambda x: axes.psum(x, "tp") + axes.all_gather(x, "dp").sum(), "a b@tp -> a b@tp", mesh=mesh)
    fn(axes.shard(WHOLE, "a b@tp", mesh=mesh))


@torch.compile(backend="eager")
def compiled(x):
    return axes.reshard(x, "a b@tp") * 2


ACTIONS = {
    "reshard": lambda mesh: axes.reshard(axes.shard(WHOLE, "a@tp b", mesh=mesh), "a b@tp"),
    "over both": lambda mesh: axes.reshard(axes.from_local(WHOLE, "a b | sum@(dp tp)", mesh=mesh), "a b |"),
    "async": lambda mesh: axes.reshard(axes.shard(WHOLE, "a@tp b", mesh=mesh), "a b@tp", async_op=True) + 1,
    "a plain tensor": lambda mesh: axes.reshard(torch.ones(2, 8), "a@dp b -> a b", mesh=mesh),
    "reduce": lambda mesh: axes.reduce(axes.shard(WHOLE, "a@tp b", mesh=mesh), "a@tp b -> b", "sum"),
    "softmax": lambda mesh: axes.softmax(axes.shard(WHOLE, "a b@tp", mesh=mesh), "a b@tp", over="b"),
    "a region": region,
    "compiled": lambda mesh: compiled(axes.shard(WHOLE, "a@tp b", mesh=mesh)),
    "psum": lambda mesh: axes.psum(torch.ones(3), ("dp", "tp"), mesh=mesh),
    "unshard": lambda mesh: axes.unshard(axes.shard(WHOLE, "a@dp b@tp", mesh=mesh)),
    "shard": lambda mesh: axes.shard(WHOLE, "a@dp b", mesh=mesh["dp"], source_rank=mesh.axis("dp").ranks[1]),
    "rand": lambda mesh: axes.rand("a@tp", a=8, mesh=mesh["tp"]),
    "torch's operations": lambda mesh: torch.relu(axes.shard(WHOLE, "a@dp b@tp", mesh=mesh)).sum(0).full_tensor(),
    "torch's distribute": lambda mesh: distribute_tensor(WHOLE, mesh.device_mesh, [Shard(0), Shard(1)]),
    "backward": backward,
}


def every_action(own):
    meshes = [
        axes.init_mesh("dp=2 tp=2", "all = dp tp", options=o)
        for o in (None, dict.fromkeys(("dp", "tp", "all"), PATIENT))
    ]
    for mesh in meshes:
        mesh.create_groups()
    for name, act in (*ACTIONS.items(), *ACTIONS.items()):
        with case(f"{name}, {'with' if own else 'without'} options"):
            before = counts()
            act(meshes[own])
            used = {own for name, (own, n) in counts().items() if n > before.get(name, (own, 0))[1]}
            assert used == {own}


@pytest.mark.parametrize("own", [False, True])
def test_every_way_to_communicate_uses_the_groups_of_its_own_mesh(world, own):
    world(every_action, 4, own)


def one_step(mesh, x):
    """A model on a mesh, with collectives of both views, there and back."""
    dp, tp, _ = mesh.names
    sharded = axes.shard(x, f"a@{dp} b@{tp}", mesh=mesh).requires_grad_()
    axes.unshard(axes.reshard(sharded.sin(), f"a@{tp} b")).sum().backward()
    total = axes.psum(x[:1] * mesh.coordinate[dp], (dp, tp), mesh=mesh)
    return torch.allclose(axes.unshard(sharded.grad), x.cos()) and torch.allclose(total, 4 * x[:1])


def two_models_on_the_same_ranks(check):
    """Each in its own thread and lane; the ranks start them in unlike orders."""
    lanes = [dict.fromkeys((f"dp{n}", f"tp{n}", "all"), GroupOptions(lane=f"lane{n}")) for n in (1, 2)]
    meshes = [axes.init_mesh("{}=2 {}=4".format(*lane), "all = {} {}".format(*lane), options=lane) for lane in lanes]
    wrong = []
    for mesh in meshes:
        mesh.create_groups(*mesh.names)
        one_step(mesh, torch.ones(4, 4))

    def train(which: int) -> None:
        generator = torch.Generator().manual_seed(which)
        wrong.extend(step for step in range(20) if not one_step(meshes[which], torch.randn(4, 4, generator=generator)))

    with axes.debug(check=check):
        threads = [threading.Thread(target=train, args=(which,)) for which in (0, 1)]
        for thread in threads if dist.get_rank() % 2 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join(50)
    return wrong, any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("check", [False, True])
def test_two_models_in_one_process_have_a_lane_each_and_are_compared_apart(pool, check):
    assert pool.run(two_models_on_the_same_ranks, check) == [([], False)] * 8


def aborted():
    axes.destroy_process_groups()
    mesh = axes.init_mesh("dp=2 tp=4")
    mesh.create_groups("dp", "tp")
    axes.init_mesh("grads=2 tp=4", options={"grads": GroupOptions(lane="grads")}).create_groups("grads")
    dist.barrier()  # until all have connected
    x = axes.shard(torch.arange(4.0), "a@dp", mesh=mesh)
    first, every = mesh.axis("dp").group, len(axes.process_groups())
    mesh["dp"].abort()
    left = [info.names for info in axes.process_groups()[1:]]
    mesh.abort()
    default = [info.origin for info in axes.process_groups()]
    assert mesh.axis("dp").group is not first
    assert axes.psum(torch.ones(1), "dp", mesh=mesh).item() == 2
    assert "of this DeviceMesh have been ended, by" in (text := error_of(lambda: axes.unshard(x))), text
    return every, left, default


def test_abort_ends_the_groups_of_a_mesh_and_they_are_made_anew(pool):
    assert pool.run(aborted) == [(4, [("tp",)], ["default"])] * 8


def listing():
    axes.destroy_process_groups()
    mesh = axes.init_mesh("dp=4 tp=2", "ep = tp")
    for name in ("tp", "tp", "ep", "dp"):
        mesh.axis(name).group.size()
    found = axes.process_groups()
    assert repr(found) == "\n".join(map(repr, found)) == "\n".join(map(str, found))
    return [(info.names, list(info.ranks), info.origin, str(info)) for info in found]


def test_the_groups_that_exist_are_listed_with_who_asked_for_them(pool):
    default, tp, dp = pool.run(listing)[3]
    assert (default[1:3], dp[:3]) == ((list(range(8)), "default"), (("dp",), [1, 3, 5, 7], "made"))
    assert tp == (("tp", "ep"), [2, 3], "made", "tp, ep: ranks 2, 3  gloo  made")


def test_options_are_equal_where_their_words_are_and_a_backends_own_object_is_the_same_one():
    one, other = object(), object()
    assert GroupOptions("nccl", one, 5) == GroupOptions("nccl", one, 5.0) != GroupOptions("nccl", other, 5)
    assert GroupOptions("nccl", one, 5).text == "backend=nccl timeout=0:00:05 pg_options=object"
    assert pickle.loads(pickle.dumps(PATIENT)) == PATIENT != GroupOptions(timeout=timedelta(seconds=77), lane="a")


# ----------------------------------------------------------------------- starting the world

WITHOUT_A_LAUNCHER = """
import atexit, os, torch, torch.distributed as dist, axes
atexit.register(lambda: print(dist.is_initialized()))
os.environ["RANK"] = "0"
for bad in ("cpu", "cuda:0", 3, "nonsense"):
    try:
        axes.init_mesh("dp", device_type=bad)
    except (axes.MeshError, ValueError) as error:
        print(error)
    os.environ.pop("RANK", None)
mesh = axes.init_mesh("dp tp", tp=1, device_type="cpu")
x = torch.ones(2)
dist.all_reduce(x, group=mesh.axis("dp").group)
print(mesh.shape, mesh.coordinate, x.tolist(), len(axes.process_groups()))
axes.destroy_process_groups()
print(dist.is_initialized(), axes.process_groups())
print(axes.init_mesh("dp", device_type="cpu").axis("dp").group.size())
"""


STARTED_BY_HAND = """
import os, sys, time, torch, axes

def run(rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    mesh = axes.init_mesh("a=2 b=2", device_type="cpu")
    time.sleep(rank == 0)                           # the others end their world before
    axes.destroy_process_groups()
    again = axes.init_mesh("a=2 b=2", device_type="cpu")
    time.sleep(rank in (1, 3))                      # ranks 0 and 2 have ended
    assert [axes.psum(torch.ones(1), "a", mesh=each).item() for each in (again, mesh)] == [2, 2]

if __name__ == "__main__":
    if len(sys.argv) > 2:
        run(int(sys.argv[2]), sys.argv[1])
    else:
        torch.multiprocessing.spawn(run, sys.argv[1:], nprocs=4)
"""


@pytest.mark.parametrize("ranks", [("0", "1", "2", "3"), ()], ids=["programs", "spawned"])
def test_ranks_that_were_started_by_hand_need_no_agent_for_the_store(ranks, tmp_path, monkeypatch):
    # Rank 0 hosts the store: others may need it when rank 0 ends its world, and when it ends.
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    (tmp_path / "program.py").write_text(STARTED_BY_HAND)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        command = [sys.executable, str(tmp_path / "program.py"), str(found.getsockname()[1])]
    commands = [[*command, rank] for rank in ranks] or [command]
    started = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        said = [each.communicate(timeout=200)[1] for each in started]
        assert [each.returncode for each in started] == [0] * len(started), said
    finally:
        for each in started:
            each.kill()


def test_without_a_launcher_a_script_runs_as_a_world_of_one_that_ends_with_it(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", WITHOUT_A_LAUNCHER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Error initializing torch.distributed using env:// rendezvous: environment variable WORLD_SIZE expected, but not set",
        *(
            "device_type is a name without an index, such as 'cuda' or 'cpu', for which torch.distributed has a backend; "
            f"found {given}"
            for given in ("'cuda:0'", "3", "'nonsense'")
        ),
        "{'dp': 1, 'tp': 1} {'dp': 0, 'tp': 0} [1.0, 1.0] 1",
        "False []",
        "1",
        "False",
    ]


def the_limit():
    axes.init_mesh("dp", timeout=3)
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 1:
        return store.wait(["ended"], timedelta(seconds=60))
    with pytest.raises(RuntimeError, match="Timed out waiting 3000ms"):
        dist.all_reduce(torch.ones(1))
    return store.set("ended", "")


def test_the_limit_of_a_mesh_is_that_of_the_default_group_whoever_made_it(world):
    world(the_limit, 2)


def test_a_mesh_is_bound_to_the_accelerator_where_the_running_world_serves_it(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    with axes.simulate(8):
        assert axes.init_mesh("dp").device_mesh.device_type == "cuda"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert axes.init_mesh("dp").device_mesh.device_type == "cpu"
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------- simulated worlds


def rows_of(rank: int) -> list[int]:
    """Rows of a 20-row tensor after each of some operations of torch, as this rank of a simulated world."""
    with axes.simulate(8, rank):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        x = distribute_tensor(torch.ones(20, 20), mesh, [Shard(0)])
        w = distribute_tensor(torch.ones(20, 20), mesh, [Replicate()])
        results = [x, x + 1, x @ w, torch.softmax(x, 1), w.redistribute(mesh, [Shard(0)])]
        assert all(y.device_mesh is mesh for y in results)
        ours = axes.init_mesh("dp tp=2")
        assert dist.get_process_group_ranks(ours.axis("tp").group) == [rank & ~1, rank | 1]
        return [y.to_local().shape[0] for y in results]


def test_nothing_of_one_simulated_world_is_seen_in_the_next():
    # DTensor's caches take equal meshes for the same: another rank, the same mesh, another answer.
    assert [rows_of(rank) for rank in (0, 7, 6, 0)] == [[3] * 5, [0] * 5, [2] * 5, [3] * 5]
    assert axes.process_groups() == []


def test_the_process_is_that_rank_of_that_world_until_the_block_ends_however_it_does():
    for size, rank in ((1, 0), (8, 3), (131072, 77777)):
        with suppress(ZeroDivisionError), axes.simulate(size, rank):
            assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
            dist.all_reduce(torch.ones(3))
            dist.barrier()
            1 / 0  # noqa: B018
        assert not dist.is_initialized()
    with axes.simulate(4):
        assert dist.get_rank() == 0
        with pytest.raises(axes.AxesError, match=r"in one already \(rank 0 of 4, fake\)"), axes.simulate(4):
            pass
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(axes.AxesError, match="destroy_process_group"), axes.simulate(4):
        pass
    assert dist.get_backend() == "gloo"  # a world that the block started instead is left running
    dist.destroy_process_group()


# ---------------------------------------------------------------------- device meshes


def as_torch_has_it(declaration, ranks, expression):
    """Coordinate i is rank i of a group, a device mesh is the mesh as torch has it, and shards lie where coordinates say."""
    mesh = axes.init_mesh(declaration, ranks=ranks)
    mesh = mesh.rearrange(expression) if expression else mesh
    made, names = mesh.device_mesh, mesh.axis_names
    flat = mesh.rearrange(f"{' '.join(names)} -> all=({' '.join(reversed(names))})")
    assert made.mesh.tolist() == mesh.ranks
    if mesh.coordinate is None:
        assert made.get_coordinate() is None
        assert distribute_tensor(WHOLE, made, [Shard(0)] * mesh.ndim).to_local().numel() == 0
        assert "isn't one of the ranks" in error_of(lambda: mesh.axis(names[0]).group.size())
        return
    for axis in [*map(mesh.axis, names), flat.axis("all")]:
        with case(f"axis {axis.name}"):
            group, start, line = axis.group, torch.tensor([axis.index * 10]), list(axis.ranks)
            assert funcol.all_gather_tensor(torch.tensor([dist.get_rank()]), 0, group).tolist() == line
            dist.broadcast(start, src=line[0], group=group)
            assert (dist.get_process_group_ranks(group), group.rank(), start.item()) == (line, axis.index, 0)
    as_root = {"_layout": made._layout, "_rank_map": made._rank_map, "_root_mesh": made._root_mesh}
    theirs = vars(DeviceMesh("cpu", mesh_dim_names=names, **as_root, _init_backend=False))
    checks = {
        "coordinate": made.get_coordinate() == tuple(mesh.coordinate.values()),
        "places": tuple(made.get_local_rank(i) for i in range(made.ndim)) == made.get_coordinate(),
        "no field more": vars(made).keys() == {*theirs, "_dim_group_names", "_hash"},
        "fields": all(vars(made)[name] == theirs[name] for name in {*theirs} - {"_hash", "_rank_map"}),
        "groups": made.get_all_groups() == [mesh.axis(name).group for name in mesh.axis_names],
        "adopted": Mesh.from_device_mesh(made) == mesh,
        "one object": mesh.define("more = " + mesh.axis_names[0]).device_mesh is made,
    }
    assert all(checks.values()), checks
    source, target = [Shard(0), Shard(1), Shard(0)][: mesh.ndim], [Shard(1), Replicate(), Shard(0)][: mesh.ndim]
    x = distribute_tensor(WHOLE, made, source)
    pending = DTensor.from_local(WHOLE / mesh.size, made, [Partial()] * mesh.ndim)
    for y, placements in (
        (x, source),
        (x.redistribute(placements=target), target),
        (pending.redistribute(placements=target), target),
    ):
        expected = WHOLE
        for name, placement in zip(mesh.axis_names, placements, strict=True):
            if placement.is_shard():
                expected = expected.chunk(mesh.axis(name).size, placement.dim)[mesh.axis(name).index]
        assert torch.equal(y.to_local(), expected)
        assert torch.equal(y.full_tensor(), WHOLE)


@pytest.mark.parametrize(
    ("declaration", "ranks", "expression"),
    [
        ("dp=2 tp=4", None, "dp tp -> tp dp"),
        ("dp=2 tp=4", None, "dp tp -> x=(tp dp)"),
        ("dp=2 tp=4", SHUFFLED, None),
        ("x=4", [6, 3, 5, 0], None),
        ("x=3 y=2", [6, 1, 3, 2, 5, 0], None),
        ("a=2 b=2 c=2", None, "a b c -> c b a"),
        ("pp=1 dp=2 tp=2", [0, 2, 4, 6], None),
    ],
)
def test_groups_and_shards_are_where_the_coordinates_say_in_any_order_of_ranks(pool, declaration, ranks, expression):
    pool.run(as_torch_has_it, declaration, ranks, expression)


def flattened_by_hand(ranks):
    """What FSDP2 and trainers do with a DeviceMesh: they flatten dims."""
    mesh = axes.init_mesh("dp=2 cp=2 tp=2", "fsdp = dp cp", ranks=ranks)
    whole, joint = mesh.device_mesh, mesh["fsdp"].device_mesh
    before = made_by_torch()
    flat, backwards = whole["dp", "cp"]._flatten("dp_cp"), mesh["cp", "dp"].device_mesh._flatten("cp_dp")
    shards = [distribute_tensor(WHOLE, each, [Shard(0)]) for each in (flat, joint)]
    again = whole["cp", "tp"]._flatten("dp_cp")
    checks = {
        "one object": flat is whole["dp", "cp"]._flatten(),
        "its group": flat.get_group() is mesh.axis("fsdp").group,
        "its ranks": flat.mesh.tolist() == joint.mesh.tolist() == mesh["fsdp"].ranks,
        "its place": flat.get_local_rank() == mesh.axis("fsdp").index,
        "backwards": backwards.mesh.tolist() == mesh.rearrange("dp cp tp -> x=(cp dp) tp")["x"].ranks,
        "its order": dist.get_process_group_ranks(backwards.get_group()) == backwards.mesh.tolist(),
        "two groups more": made_by_torch() == before + 2,
        "shards": torch.equal(*[x.to_local() for x in shards]) and torch.equal(shards[0].full_tensor(), WHOLE),
        "adopted": Mesh.from_device_mesh(flat).axis("dp_cp").group is mesh.axis("fsdp").group,
        "a name of others": again.mesh.tolist() == mesh.rearrange("dp cp tp -> dp x=(cp tp)")["x"].ranks,
        "an axis": whole["cp", "tp"]._flatten("dp").get_group() is again.get_group() is not whole.get_group("dp"),
    }
    assert all(checks.values()), checks
    for device_mesh, names in ((whole, "nothing"), (whole, ("tp", "dp")), (whole, "dp_cp"), (whole["tp"], "dp_cp")):
        with pytest.raises(KeyError):
            device_mesh[names]
    # An axis of this name that is other ranks has the name for itself.
    other = axes.init_mesh("dp_cp=2 rest=4", ranks=ranks)
    assert other.device_mesh.get_group("dp_cp") is other.axis("dp_cp").group


@pytest.mark.parametrize("ranks", [None, SHUFFLED])
def test_flattened_dims_have_the_group_of_their_ranks(world, ranks):
    world(flattened_by_hand, 8, ranks)


def adopt():
    axes.destroy_process_groups()
    dense = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    joint = dense["dp", "cp"]._flatten("fsdp")
    whole = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    sparse = whole._unflatten(0, (2, 4), ("efsdp", "ep"))
    one = DeviceMesh.from_group(sparse.get_group("ep"), "cpu", mesh_dim_names=("line",))
    concatenated = DeviceMesh._concatenate([joint, dense["tp"]])
    before = made_by_torch()
    for device_mesh in (dense, dense["tp"], dense["dp", "tp"], joint, whole, sparse, sparse["ep"], one, concatenated):
        mesh = Mesh.from_device_mesh(device_mesh)
        assert mesh is Mesh.from_device_mesh(device_mesh)
        assert mesh.device_mesh is device_mesh
        assert mesh.axis_names == device_mesh.mesh_dim_names
        assert mesh.ranks == device_mesh.mesh.tolist()
        assert tuple(mesh.coordinate.values()) == device_mesh.get_coordinate()
        for i, name in enumerate(mesh.axis_names):
            # torch made efsdp a group of its own for the ranks of dp; axes knows the first.
            first = dense.get_group("dp") if name == "efsdp" else device_mesh.get_group(i)
            assert mesh.axis(name).group is first
    # Other meshes over the same ranks find the adopted groups, and combine with them.
    mesh = axes.init_mesh("dp cp=2 tp=2", "fsdp = dp cp", "(cp tp) = ep")
    assert mesh.axis("fsdp").group is joint.get_group()
    assert mesh.axis("ep").group is sparse.get_group("ep")
    assert DeviceMesh._concatenate([mesh["fsdp"].device_mesh, dense["tp"]]).mesh.tolist() == mesh["fsdp", "tp"].ranks
    assert made_by_torch() == before


def refuse():
    def torchs() -> DeviceMesh:
        return DeviceMesh("cpu", [3, 1, 2, 0], mesh_dim_names=("x",))

    texts = [
        error_of(lambda made=made: Mesh.from_device_mesh(made))
        for made in (
            torchs(),
            DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("x", "y")),
            DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("x", "y"))._flatten("xy"),
        )
    ]
    nameless = Mesh.from_device_mesh(DeviceMesh("cpu", [[0, 1], [2, 3]]))
    assert (nameless.axis_names, nameless.ranks) == (("dim_0", "dim_1"), [[0, 1], [2, 3]])
    assert axes.psum(torch.ones(1), "dim_1", mesh=nameless).item() == 2
    # Every line of this one ascends, although its ranks don't.
    fine = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("x", "y"))
    assert Mesh.from_device_mesh(fine).ranks == [[0, 2], [1, 3]]
    # Ours with the same ranks is fine, and torch's equal one is refused all the same.
    ours = axes.init_mesh("x", ranks=[3, 1, 2, 0])
    assert ours.device_mesh == torchs()
    assert Mesh.from_device_mesh(ours.device_mesh) == ours
    assert "sorts the ranks" in error_of(lambda: Mesh.from_device_mesh(torchs()))
    return texts


def test_a_device_mesh_is_adopted_with_its_groups_however_it_was_made(world):
    world(adopt, 8)


def test_a_device_mesh_whose_groups_have_another_order_is_refused_on_all_ranks(world):
    for permuted, rows, flat in world(refuse, 4):
        assert "dim 'x' of the DeviceMesh runs through ranks 3, 1, 2, 0 in this order" in permuted
        assert "its process group through ranks 0, 1, 2, 3" in permuted
        assert "ranks 3, 2 in this order" in rows
        assert "ranks 0, 2, 1, 3 in this order" in flat
        assert "axes.init_mesh(..., ranks=[...])" in flat
