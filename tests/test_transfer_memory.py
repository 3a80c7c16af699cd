"""The memory of a transfer: what autograd is told of tensors that it writes, whose memory is whose, what is packed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import axes
from axes.algebra.errors import AxesError
from axes.algebra.transfers import Transfer
from axes.runtime import torch_private, transfer_runs

ROWS, COLUMNS = 512, 1024
"""A whole tensor of 2 MiB: what goes from one of four ranks to another is large enough to be sent from where it lies."""


def both_sides(**how: Any) -> tuple[axes.Mesh, axes.Mesh, Transfer]:
    """A trainer on ranks 0 to 3, a server on ranks 4 to 7, and a plan by which tiles of the one are those of the other."""
    trainer = axes.init_mesh("a=4", ranks=range(4), device_type="cpu")
    server = axes.init_mesh("b=4", ranks=range(4, 8), device_type="cpu")
    shapes = {"w": (ROWS, COLUMNS)}
    return trainer, server, axes.transfer({"w": "f@a d"}, {"w": "f@b d"}, trainer, server, shapes, **how)


def tile(value: float) -> torch.Tensor:
    return torch.full((ROWS // 4, COLUMNS), value)


def refused(call: Callable[[], object]) -> str:
    """What a call raises; nothing where it doesn't."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


# --- autograd -------------------------------------------------------------------------------------


def plain(mesh: axes.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    w = tile(2.0).requires_grad_()
    return w, w


def a_view(mesh: axes.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((2, ROWS // 4, COLUMNS), 2.0).requires_grad_()
    return base, base[1]


def every_second_element(mesh: axes.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((ROWS // 4, 2 * COLUMNS), 2.0).requires_grad_()
    return base, base[:, ::2]


def a_dtensor(mesh: axes.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    w = axes.shard(torch.full((ROWS, COLUMNS), 2.0), "f@b d", mesh=mesh).requires_grad_()
    return w, w


def its_shard(mesh: axes.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    w = axes.shard(torch.full((ROWS, COLUMNS), 2.0), "f@b d", mesh=mesh).requires_grad_()
    return w.to_local(), w


def a_view_of_a_dtensor(mesh: axes.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    w = axes.shard(torch.full((ROWS, COLUMNS), 2.0), "f@b d", mesh=mesh).requires_grad_()
    return w, w.view(ROWS, COLUMNS)


SAVED = (plain, a_view, every_second_element, a_dtensor, its_shard, a_view_of_a_dtensor)
"""What a graph saves, and what a transfer writes into: the memory of both is the same."""

CHANGED = re.compile("modified (by an )?inplace")
JOBS = ("generator", "trainer")


def written_after_it_is_saved() -> list[str]:
    """What backward says of each tensor that a transfer has written since the graph saved it."""
    _, server, move = both_sides()
    told = []
    for make in SAVED:
        if server.coordinate is None:
            move({"w": tile(1.0)})
            move({"w": tile(1.0)})
            continue
        saved, into = make(server)
        loss = (saved * saved).sum()
        move({}, into={"w": into})
        told.append(refused(loss.backward))
        w = torch.nn.Parameter(make(server)[1].detach())
        move({}, into={"w": w})
        (w * w).sum().backward()  # what is saved behind the transfer is right
        grad = w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad
        assert w.is_leaf
        assert torch.equal(grad, tile(2.0)), make.__name__
    return told


def test_backward_refuses_what_a_transfer_has_written_since_it_was_saved(pool):
    for rank, told in enumerate(pool.run(written_after_it_is_saved)):
        if rank > 3:
            assert [make.__name__ for make, text in zip(SAVED, told, strict=True) if not CHANGED.search(text)] == []


def received_after_it_is_saved(path: str) -> list[str]:
    """What backward says of tensors into which another job's were received after the graph had saved them."""
    rank, told = torch.distributed.get_rank(), []
    meshes = {name: axes.init_mesh("a=1", ranks=[at], device_type="cpu") for at, name in enumerate(JOBS)}
    if rank >= len(JOBS):
        return told
    with axes.connect(torch.distributed.FileStore(path), JOBS[rank], meshes[JOBS[rank]], timeout=60) as link:
        for of_dtensor in (False, True):
            whole = torch.full((ROWS, COLUMNS), 2.0)
            if rank == 1:
                link.send({"w": whole}, {"w": "f d"})
                continue
            w = (axes.shard(whole, "f@a d", mesh=link.mesh) if of_dtensor else whole).requires_grad_()
            loss = (w * w).sum()
            link.receive(into={"w": w}, specs={"w": "f d"})
            told.append(refused(loss.backward))
    return told


def test_backward_refuses_what_another_job_has_written_since_it_was_saved(pool, tmp_path):
    told = pool.run(received_after_it_is_saved, str(tmp_path / "store"))[0]
    assert [CHANGED.search(text) is not None for text in told] == [True, True]


# --- memory that comes and goes -------------------------------------------------------------------


def arrived(move: Transfer, into: torch.Tensor, value: float) -> bool:
    """Whether a value that the trainer's ranks send arrives."""
    rank = torch.distributed.get_rank()
    move({"w": tile(value)} if rank < 4 else {}, {} if rank < 4 else {"w": into})
    return rank < 4 or torch.equal(into, tile(value))


def freed_and_used_again() -> list[object]:
    """A transfer into memory that another storage had at the last one; and into a storage that has none."""
    _, server, move = both_sides(bucket_mb=1e-2)  # nothing is received where it lies
    memory = tile(0.0)
    first = [torch.frombuffer(memory.numpy(), dtype=torch.float32).view(memory.shape) for _ in range(2)]
    assert first[0].data_ptr() == first[1].data_ptr()
    found: list[object] = [arrived(move, first[0], 3.0)]
    run = transfer_runs.run_of(move)
    bound = run.bound
    found += [arrived(move, first[1], 4.0), run.bound is not bound or server.coordinate is None]
    into = tile(0.0)
    found.append(arrived(move, into, 5.0))
    into.untyped_storage().resize_(0)
    try:
        arrived(move, into, 6.0)
    except AxesError as error:
        found.append(f"{type(error).__name__}: {error}")
    into.untyped_storage().resize_(into.numel() * into.element_size())
    found.append(arrived(move, into, 7.0))
    return found


def test_memory_that_is_given_back_and_used_again_is_another_tensors(pool):
    for rank, found in enumerate(pool.run(freed_and_used_again)):
        *right, text, last = found
        assert (right, last) == ([True] * 4, True), (rank, found)
        assert text.startswith("ShardingError: ")
        assert "'w' has no memory: its storage has been resized to less than it takes" in text, text


def kept_with_empty_shards() -> bool:
    """Whether views are kept between calls where a rank has no elements of a tensor, and passes none."""
    mesh = axes.init_mesh("a=8", device_type="cpu")
    move = axes.transfer({"w": "f@a d", "b": "d"}, {"w": "f d@a", "b": "d"}, mesh, mesh, {"w": (3, 16), "b": (4,)})
    held = {"w": axes.to_local(axes.shard(torch.ones(3, 16), "f@a d", mesh=mesh)), "b": torch.ones(4)}
    into, run = {"w": torch.zeros(3, 2), "b": torch.zeros(4)}, transfer_runs.run_of(move)
    if not held["w"].numel():
        del held["w"]
    move(held, into)
    first = run.bound
    move(held, into)
    return first is not None and run.bound is first


def test_views_are_kept_where_a_rank_has_no_elements_of_a_tensor(pool):
    assert pool.run(kept_with_empty_shards) == [True] * 8


def none_in_place_of_a_tensor() -> tuple[str, bool]:
    move = both_sides()[2]
    rank = torch.distributed.get_rank()
    into = {"w": tile(0.0)} if rank > 3 else {"w": None}  # of a rank that gets nothing
    with pytest.raises(AxesError) as caught:
        move({"w": tile(1.0)} if rank < 4 else {}, {"w": None} if rank == 6 else into)
    found = move({"w": tile(1.0)} if rank < 4 else {}, into)
    return f"{type(caught.value).__name__}: {caught.value}", found == {} or torch.equal(found["w"], tile(1.0))


def test_none_in_place_of_a_tensor_that_arrives_is_an_error_on_every_rank(pool):
    for rank, (text, right) in enumerate(pool.run(none_in_place_of_a_tensor)):
        assert text.startswith("ShardingError: "), text
        assert "'w' of into= is None, and rank 6 gets a shard of shape [128, 1024]; pass a tensor" in text, (rank, text)
        assert right


def test_none_stands_for_a_shard_without_elements():
    with axes.simulate(1):
        mesh = axes.init_mesh("a=1", device_type="cpu")
        move = axes.transfer({"w": "f@a d"}, {"w": "f d"}, mesh, mesh, {"w": (0, 4)})
        assert move({"w": None}, into={"w": None})["w"].shape == (0, 4)


# --- replicas -------------------------------------------------------------------------------------


class Counting:
    """A codec of the same bytes that counts the elements which it encodes."""

    def __init__(self) -> None:
        self.encoded = 0

    def nbytes(self, count: int, dtype: str) -> int:
        return 4 * count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self.encoded += len(values)
        out.view(torch.float32).copy_(values)

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(coded.view(torch.float32))


def sent_to_replicas(codec: bool) -> tuple[int, int]:
    """How many elements a rank packs or encodes for four replicas, and how many it sends; each arrives as it was."""
    rank, coder = torch.distributed.get_rank(), Counting()
    source = axes.init_mesh("a=4", ranks=range(4), device_type="cpu")
    target = axes.init_mesh("dp=4", ranks=range(4, 8), device_type="cpu")
    shapes = {"w": (8, 6), "v": (640, 512), "b": (8,)}
    wholes = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in shapes.items()}
    specs = {"w": "f@a d", "v": "f d@a", "b": "d@a"}
    move = axes.transfer(
        specs, {"w": "f d", "v": "f d", "b": "d"}, source, target, shapes, codec=coder if codec else None
    )
    held = {n: axes.to_local(axes.shard(wholes[n], specs[n], mesh=source)) for n in shapes} if rank < 4 else {}
    if held:
        held["v"] = held["v"].t().contiguous().t()  # which can't be sent from where it lies
    packed, copied = [0], torch_private.copy_all

    def counted(to: list[torch.Tensor], origin: list[torch.Tensor]) -> None:
        packed[0] += sum(x.numel() for x in to)
        copied(to, origin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "copy_all", counted)
        found = move(held)
    for name, x in found.items():
        assert torch.equal(axes.to_local(x), wholes[name]), name
    sent = sum(step.bytes_out for step in move.at(rank).steps) // 4
    return (coder.encoded if codec else packed[0]) if rank < 4 else 0, sent


@pytest.mark.parametrize("codec", [False, True])
def test_what_goes_to_several_replicas_is_packed_and_encoded_once(pool, codec):
    for packed, sent in pool.run(sent_to_replicas, codec)[:4]:
        assert 4 * packed == sent > 0
