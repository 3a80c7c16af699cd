"""The time of moving a state dict between two meshes on disjoint ranks, on eight processes.

From `fsdp=4` on ranks 0 to 3 to `dp=2 tp=2` on ranks 4 to 7: 256 MB in float32, 25 blocks of eight tensors, which are
column- and row-parallel matrices and norms that are whole on every rank; 512 small matrices; and 300 tensors from 1 KiB
to 8 MiB. The peers are one exchange of as many bytes between the same ranks, from and to one flat buffer that lies
right; and what trainers do tensor by tensor: gather the tensor on the ranks that have it, broadcast it from one of them
to those that want it, slice.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import axes
from axes.transfers.execution import run_of
from axes.transfers.transfers import Transfer
from tests.bench.measure import Times, benchmark, printed_by

RANKS, BLOCKS, WIDTH, ROUNDS = 8, 25, 560, 8

State = dict[str, tuple[tuple[int, ...], str, str]]
"""By name the whole shape of a tensor, its spec on the trainer, and that on the server."""

COLUMNS, ROWS = ("f@fsdp d", "f@tp d"), ("f@fsdp d", "f d@tp")


def of_blocks() -> State:
    """The state dict of a transformer."""
    found = {}
    for block in range(BLOCKS):
        for name, rows, columns, specs in (
            ("q", 1, 1, COLUMNS),
            ("k", 1, 1, COLUMNS),
            ("v", 1, 1, COLUMNS),
            ("o", 1, 1, ROWS),
            ("up", 2, 1, COLUMNS),
            ("down", 1, 2, ROWS),
        ):
            found[f"{block}.{name}"] = ((rows * WIDTH, columns * WIDTH), *specs)
        found |= {f"{block}.norm{at}": ((WIDTH,), "d@fsdp", "d") for at in (1, 2)}
    return found


def of_many() -> State:
    """512 tensors of 16 KiB."""
    return {f"{at}": ((64, 64), *(COLUMNS if at % 2 else ROWS)) for at in range(512)}


def mixed() -> State:
    """300 tensors of 1 KiB to 8 MiB, as many of each order of magnitude."""
    drawn = random.Random(1)
    return {
        f"{at}": ((2 ** drawn.randint(4, 11), 2 ** drawn.randint(4, 10)), *drawn.choice((COLUMNS, ROWS)))
        for at in range(300)
    }


def sides(state: State) -> tuple[axes.Mesh, axes.Mesh, Transfer]:
    """Both meshes, and the plan between them."""
    trainer = axes.init_mesh("fsdp=4", ranks=range(4), device_type="cpu")
    server = axes.init_mesh("dp=2 tp=2", ranks=range(4, 8), device_type="cpu")
    shapes, sources, targets = ({name: one[at] for name, one in state.items()} for at in range(3))
    return trainer, server, axes.transfer(sources, targets, trainer, server, shapes).at(dist.get_rank())


def shards(mesh: axes.Mesh, state: State, side: int) -> dict[str, torch.Tensor] | None:
    """This rank's shards on a mesh, None outside it."""
    if mesh.coordinate is None:
        return None
    return {name: torch.rand(mesh.sharding(one[1 + side]).local_shape(one[0])) for name, one in state.items()}


def one_exchange(move: Transfer) -> Callable[[], object]:
    """As many bytes between the same ranks."""
    given, taken = [0] * RANKS, [0] * RANKS
    for step in move.steps:
        for counts, side in ((given, step.sends), (taken, step.receives)):
            for peer, slices in side.items():
                counts[peer] += sum(each.size for each in slices) // 4
    sent, out = torch.rand(sum(given)), torch.empty(sum(taken))
    return lambda: dist.all_to_all_single(out, sent, taken, given)


def tensor_by_tensor(state: State, trainer: axes.Mesh, server: axes.Mesh, held: Any, into: Any) -> Callable[[], object]:
    """Gathered by DTensor, broadcast whole, sliced by those that want a part."""
    group = dist.new_group([0, *server.universe.ranks])
    device_mesh = trainer.device_mesh if held is not None else None
    have = {} if held is None else {n: DTensor.from_local(x, device_mesh, [Shard(0)]) for n, x in held.items()}

    def run() -> None:
        for name, (shape, _, target) in state.items():
            whole = have[name].full_tensor() if have else torch.empty(shape)
            if dist.get_rank() in (0, *server.universe.ranks):
                dist.broadcast(whole, 0, group=group)
            if into is not None:
                into[name].copy_(whole[server.sharding(target).local_indices(shape)])

    return run


def measured(make: Callable[[], State], at_once: bool) -> tuple[float, float]:
    torch.set_num_threads(1)
    state = make()
    trainer, server, move = sides(state)
    held, into = shards(trainer, state, 0), shards(server, state, 1)

    def ours() -> object:
        return move(held or {}, into or {})

    theirs = one_exchange(move) if at_once else tensor_by_tensor(state, trainer, server, held, into)
    with torch.no_grad():
        found = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS + 2)][2:]
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    return medians[0], medians[1]


def seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started


def python_of_a_round(rounds: int = 20) -> float:
    """Seconds of a rank's processor time before the first byte of a round that finds everything as it was."""
    torch.set_num_threads(1)
    state = of_blocks()
    trainer, server, move = sides(state)
    held, into = shards(trainer, state, 0) or {}, shards(server, state, 1) or {}
    for _ in range(2):
        move(held, into)
    run, times = run_of(move, None), []
    for _ in range(rounds):
        started = time.thread_time()
        run.fit(held, into)
        run.carry(None, into)
        times.append(time.thread_time() - started)
    return statistics.median(times)


WAY = "`fsdp=4` to `dp=2 tp=2` on other ranks"
STATE = f"200 tensors, 256 MB, {WAY}"
EXCHANGE = "one `all_to_all_single` of as many bytes"


@benchmark(f"axes.transfer of {STATE}", peer=EXCHANGE, bar=0.85)
def beside_one_exchange() -> Times:
    return Times(*axes.launch(measured, RANKS, of_blocks, True)[0])


@benchmark(f"axes.transfer of 512 tensors of 16 KiB, {WAY}", peer=EXCHANGE, bar=0.5)
def beside_one_exchange_of_small_tensors() -> Times:
    return Times(*axes.launch(measured, RANKS, of_many, True)[0])


@benchmark(f"axes.transfer of 300 tensors of 1 KiB to 8 MiB, {WAY}", peer=EXCHANGE, bar=0.6)
def beside_one_exchange_of_a_mixture() -> Times:
    return Times(*axes.launch(measured, RANKS, mixed, True)[0])


@benchmark(f"axes.transfer of {STATE}", peer="gather and broadcast, tensor by tensor", bar=5)
def beside_tensor_by_tensor() -> Times:
    return Times(*axes.launch(measured, RANKS, of_blocks, False)[0])


@benchmark(f"before the first byte of a repeated axes.transfer of {STATE}", peer="two milliseconds", bar=1)
def before_the_first_byte() -> Times:
    return Times(max(axes.launch(python_of_a_round, RANKS)), 2e-3)


MANY = 64


def together() -> tuple[float, float]:
    """Seconds in which small tensors move by one call, and by one each."""
    torch.set_num_threads(1)
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    held = {f"x{at}": axes.shard(torch.rand(64, 64), "f@dp d@tp", mesh=mesh) for at in range(MANY)}
    specs = dict.fromkeys(held, "f@tp d@dp")
    target = mesh.sharding(specs["x0"]).placements

    def ours() -> object:
        return axes.reshard(held, specs)

    def torchs() -> object:
        return [x.redistribute(mesh.device_mesh, target) for x in held.values()]

    found = [(seconds(ours), seconds(torchs)) for _ in range(ROUNDS + 1)]
    one, two = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return one, two


@benchmark(f"axes.reshard of {MANY} tensors of 64 x 64 at once, four processes", peer="`redistribute` of each", bar=5)
def many_at_once() -> Times:
    return Times(*axes.launch(together, 4)[0])


MIXTURE = """
import time
from axes import Mesh, transfer
width, hidden, experts, vocabulary = 7168, 2048, 384, 163840
shapes, sources, targets, stages = {}, {}, {}, {}
whole = Mesh("pp=16 fsdp=8 tp=8", "(fsdp tp) = efsdp ep", ep=32, ranks=range(1024))
def add(name, shape, source, target):
    shapes[name], sources[name], targets[name] = shape, source, target
add("embed", (vocabulary, width), "v@tp d", "v@tp d")
add("head", (vocabulary, width), "v@tp d", "v@tp d")
for layer in range(61):
    name = f"layers.{layer}."
    add(name + "norm", (width,), "d@fsdp", "d")
    add(name + "router", (experts, width), "e d@fsdp", "e d")
    for part, rows in (("q", 16384), ("k", 2048), ("v", 2048)):
        add(name + part, (rows, width), "h@tp d@fsdp", "h@tp d")
    add(name + "o", (width, 16384), "d@fsdp h@tp", "d h@tp")
    for part in ("up", "gate"):
        add(name + part, (experts, hidden, width), "e@ep f d@efsdp", "e@tp f d")
    add(name + "down", (experts, width, hidden), "e@ep d@efsdp f", "e@tp d f")
    stages[name + "*"] = whole.at(64 * (layer * 16 // 61))["fsdp", "tp"]
stages |= {"embed": whole.at(0)["fsdp", "tp"], "head": whole.at(960)["fsdp", "tp"]}
server = Mesh("dp=16 tp=64", ranks=range(1024, 2048))
started = time.perf_counter()
move = transfer(sources, targets, stages, server, shapes, dtype="bfloat16").at(RANK)
move.steps, move.peak_bytes
print(time.perf_counter() - started)
"""


@benchmark("a trillion parameters, 1,024 ranks to 1,024: one rank's part", peer="one second", bar=1)
def a_trillion_parameters() -> Times:
    parts = [printed_by(MIXTURE.replace("RANK", str(rank))) for rank in (0, 1777)]
    return Times(max(parts), 1.0)


UNLIKE = """
import time
from axes import Mesh, plan
count = 98304
one, two = Mesh("a=3 b=32768"), Mesh("c=32768 d=3")
other = Mesh("c=32768 d=3", ranks=range(count, 2 * count))
turned = Mesh("c=32768 d=3", ranks=[*range(1, count), 0])
def seconds(source, target, mesh, shape, **sizes):
    started = time.perf_counter()
    found = plan(source, target, shape, source_mesh=one, target_mesh=mesh, **sizes)
    for step in found.steps:
        if step.takes_part(7):
            step.exchange(7)
    return time.perf_counter() - started
print(max(
    seconds("x@b y@a z", "x@c y z@d", two, (98304, 98304, 384)),
    seconds("x@(a b) y", "x y@(c d)", two, (98304, 98304)),
    seconds("x@a y", "x y@d", two, (96, 96)),
    seconds("x@b y@a", "x@c y@d", two, (32769, 7)),
    seconds("(p=3 q@b) y", "(p q@c) y@d", two, (98304, 12), q=32768),
    seconds("x@(a b)", "x@(c d)", other, (98304,)),
    seconds("(p=3 q@b) y", "(q@c p=3) y@d", two, (98304, 12)),
    seconds("x y", "x y", other, (384, 384)),
    seconds("x@b y", "x@d y", turned, (32768, 96)),
))
"""


@benchmark("a plan and a rank's part of it, 98,304 ranks without common digits", peer="two seconds", bar=1)
def ranks_without_common_digits() -> Times:
    return Times(printed_by(UNLIKE), 2.0)
