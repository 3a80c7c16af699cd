"""Ranks that disagree, wait for one another or don't come: an error on every living rank, in time.

The protocol is tested on threads that share an in-memory store, many cases in a second; what users
do with meshes and groups on real processes.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import axes
from axes.algebra.errors import AxesError, DesyncError, MeshError
from axes.runtime import agreement
from axes.runtime.agreement import Barrier, Member, agree, digest, in_time, ranks_text, refuse, without_report

SECOND = timedelta(seconds=1)
PATIENCE = timedelta(seconds=20)


def on_threads(size: int, fn: Callable[[Member], None], store: object = None) -> list[str | None]:
    """`fn(member)` on one thread for each rank; by rank the text of its `DesyncError`, if it had one."""
    shared = dist.HashStore() if store is None else store
    ended: dict[int, str | None] = {}

    def run(rank: int) -> None:
        try:
            fn(Member(shared, rank))  # type: ignore[arg-type]
            ended[rank] = None
        except DesyncError as error:
            ended[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == size, f"ranks {set(range(size)) - set(ended)} hang or failed otherwise"
    return [ended[rank] for rank in range(size)]


def mesh_barrier(members, attempt=0, subject="init_mesh"):
    return Barrier(subject, members, "mesh", attempt, "Do the same.")


class CountingStore:
    """A store that counts the calls made by each thread, and lists who adds to which counter, in order."""

    def __init__(self) -> None:
        self.store, self.calls, self.lock = dist.HashStore(), Counter(), threading.Lock()
        self.added: list[tuple[int | None, str, int]] = []
        self.ranks: dict[int, int] = {}
        """By thread the rank whose note it left last: each question to the store has a thread of its own."""

    def calls_by_rank(self) -> Counter[int]:
        """By thread how often it asked, but for polls, which become ever slower, and for what removes keys at the end."""
        found: Counter[int] = Counter()
        for (thread, name), count in self.calls.items():
            found[thread] += count if name not in ("check", "delete_key") else 0
        return found

    def __getattr__(self, name):
        method = getattr(self.store, name)

        def counted(*args):
            self.calls[threading.get_ident(), name] += 1
            if name == "set" and args[0].startswith("axes/rank/"):
                self.ranks[threading.get_ident()] = int(args[0].rpartition("/")[2])
            if name != "add":
                return method(*args)
            with self.lock:
                self.added.append((self.ranks.get(threading.get_ident()), *args))
                return method(*args)

        return counted


# ------------------------------------------------------------------------------- the protocol


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["dp=2 tp=2", "tp=2 dp=2", "dp=4"]), min_size=2, max_size=6))
def test_ranks_agree_if_and_only_if_all_state_the_same(statements):
    members = range(len(statements))
    ended = on_threads(
        len(statements),
        lambda member: agree(member, mesh_barrier(members), statements[member.rank], PATIENCE),
    )
    if len(set(statements)) == 1:
        assert ended == [None] * len(statements)
    else:
        for statement, error in zip(statements, ended, strict=True):
            assert error is not None
            assert statement in error
            assert sum(other in error for other in set(statements)) >= 2
            assert "Do the same." in error


@pytest.mark.parametrize("size", [2, 8, 32])
def test_a_rank_makes_few_store_operations_however_many_ranks_there_are(size):
    store = CountingStore()
    ended = on_threads(size, lambda member: agree(member, mesh_barrier(range(size)), "same", PATIENCE), store)
    assert ended == [None] * size
    assert max(store.calls_by_rank().values()) <= 7  # the last one also ends it
    assert store.store.num_keys() == size, "the notes of where each rank is"


@pytest.mark.parametrize("size", [4, 32])
def test_a_rank_that_is_waited_for_costs_each_of_the_others_no_more_where_they_are_many(size, monkeypatch):
    monkeypatch.setattr(agreement, "_STALLED_SECONDS", 0.1)
    store, barrier = CountingStore(), mesh_barrier(range(size))

    def meet(member: Member) -> None:
        while member.rank == 0 and not store.store.check([f"{agreement._key(barrier)}/warner"]):
            time.sleep(0.01)
        agree(member, barrier, "same", PATIENCE)

    with pytest.warns(
        UserWarning, match=r"rank 0 didn't come to init_mesh for \d s so far:\n  rank 0 hasn't been seen"
    ):
        assert on_threads(size, meet, store) == [None] * size
    assert sum(store.calls_by_rank().values()) <= 8 * size


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_barriers_in_any_orders_pass_or_fail_on_their_ranks_and_never_hang(data):
    """Overlapping groups, used first in orders that the ranks choose."""
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 1, 2, 3)]
    groups = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=4, unique=True))
    orders = [data.draw(st.permutations(groups)) for _ in range(4)]
    same_order = all(order == list(orders[0]) for order in orders)
    passed = Counter()

    def use(member: Member) -> None:
        for ranks in orders[member.rank]:
            if member.rank in ranks:
                subject = f"the group of {ranks_text(ranks)}"
                agree(member, Barrier(subject, ranks, "group", 0), "same", PATIENCE if same_order else SECOND)
                passed[ranks] += 1

    ended = on_threads(4, use)
    if same_order:
        assert ended == [None] * 4
    # A barrier passes on all of its members or on none.
    assert all(count == len(ranks) for ranks, count in passed.items())
    for error in filter(None, ended):
        assert "didn't come" in error


def test_two_ranks_in_opposite_orders_are_told_both_waits_before_the_time_is_up(monkeypatch):
    monkeypatch.setattr(agreement, "_STALLED_SECONDS", 0.5)

    def use(member: Member) -> None:
        orders = [[(0, 1), (0, 1, 2)], [(0, 1, 2), (0, 1)], [(0, 1, 2)]]
        for ranks in orders[member.rank]:
            advice = "Use mesh.create_groups(...)"
            barrier = Barrier(f"the group of {ranks_text(ranks)}", ranks, "group", 0, advice)
            agree(member, barrier, "same", 2 * SECOND)

    with pytest.warns(UserWarning, match="so far") as warned:
        ended = on_threads(3, use)
    said = "\n".join(str(each.message) for each in warned)
    assert "rank 1 waits for the group of ranks 0, 1, 2" in said
    assert "rank 0 waits for the group of ranks 0, 1" in said
    assert "mesh.create_groups" in said
    for error in ended:
        assert "didn't come to the group of ranks 0, 1" in error
        assert "mesh.create_groups" in error


def test_a_rank_that_never_comes_is_named_with_what_it_was_last_seen_waiting_for():
    def meet(member: Member) -> None:
        if member.rank == 2:
            agree(member, mesh_barrier((2, 3), subject="init_mesh over ranks 2, 3"), "x", 3 * SECOND)
        elif member.rank < 2:
            time.sleep(0.2)
            agree(member, mesh_barrier((0, 1, 2)), "x", SECOND)

    ended = on_threads(4, meet)
    assert ended[3] is None
    for error in ended[:2]:
        assert "rank 2 didn't come to init_mesh within 1 s" in error
        assert "rank 2 waits for init_mesh over ranks 2, 3" in error
    assert "rank 3 hasn't been seen" in ended[2]


class DyingStore:
    """A store that a rank asks for the last time when it is to be counted at a barrier."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return self.dies if name == "add" else getattr(self.store, name)

    def dies(self, *_):
        raise InterruptedError


def test_a_rank_that_dies_at_the_barrier_before_it_is_counted_is_named():
    def meet(member: Member) -> None:
        if member.rank == 1:
            with pytest.raises(InterruptedError):
                agree(Member(DyingStore(member.store), 1), mesh_barrier(range(3)), "x", PATIENCE)
        else:
            agree(member, mesh_barrier(range(3)), "x", SECOND)

    ended = on_threads(3, meet)
    for error in (ended[0], ended[2]):
        assert "rank 1 didn't come to init_mesh within 1 s" in error
        assert "ranks 0, 2 waited for init_mesh" in error


def test_members_that_report_no_failure_are_named_with_where_they_were_last_seen():
    def fail(member: Member) -> None:
        agree(member, mesh_barrier(range(3)), "x", PATIENCE)
        if member.rank != 1:
            raise DesyncError(without_report(member, Barrier("the sum", range(3), "failure", 0)))

    ended = on_threads(3, fail)
    assert ended[1] is None
    for error in (ended[0], ended[2]):
        assert "no report of it by rank 1, which ended, is stopped, or failed elsewhere" in error
        assert "rank 1 was last seen passing in init_mesh" in error


def test_where_all_report_their_failure_none_is_named_whatever_a_rank_reported_before():
    barrier = Barrier("the sum", range(3), "failure", 0)

    def fail(member: Member) -> None:
        agree(member, mesh_barrier(range(3)), "x", PATIENCE)
        assert without_report(member, barrier) == ""

    store = dist.HashStore()
    assert "no report of it by ranks 1, 2" in without_report(Member(store, 0), barrier)
    assert on_threads(3, fail, store) == [None] * 3


def test_a_rank_that_reported_an_earlier_failure_alone_is_named_where_it_reports_no_other(monkeypatch):
    barrier, store = Barrier("the sum", range(3), "failure", 0), dist.HashStore()
    without_report(Member(store, 0), barrier)
    monkeypatch.setattr(agreement, "_REPORT_HOLDS_SECONDS", 1.0)  # which are over: it waited as long for the others

    def fail(member: Member) -> None:
        if member.rank:
            raise DesyncError(without_report(member, barrier))

    ended = on_threads(3, fail, store)
    for error in ended[1:]:
        assert "no report of it by rank 0, which ended, is stopped, or failed elsewhere" in error
        assert "rank 0 was last seen failing in the sum" in error


def test_a_rank_that_comes_after_the_time_was_up_gets_the_same_error_at_once():
    def meet(member: Member) -> None:
        if member.rank == 0:
            agree(member, mesh_barrier(range(2)), "x", timedelta(seconds=0.3))
        else:
            while not member.store.check([f"{agreement._key(mesh_barrier(range(2)))}/end"]):
                time.sleep(0.01)
            agree(member, mesh_barrier(range(2)), "x", timedelta(hours=1))

    ended = on_threads(2, meet)
    assert ended[0] == ended[1]
    assert "rank 1 didn't come" in ended[0]


def test_a_rank_that_failed_passes_its_error_on():
    def meet(member: Member) -> None:
        if member.rank == 1:
            refuse(member, mesh_barrier(range(3)), MeshError("no such axis"))
        else:
            agree(member, mesh_barrier(range(3)), "x", PATIENCE)

    ended = on_threads(3, meet)
    assert ended[1] is None
    for error in (ended[0], ended[2]):
        assert "rank 1 can't take part in init_mesh, it raised MeshError: no such axis" in error


def test_the_next_attempt_after_a_failed_one_can_pass():
    def meet(member: Member) -> None:
        for attempt, statement in enumerate([f"differs {member.rank}", "same"]):
            if attempt:
                agree(member, mesh_barrier(range(3), attempt), statement, PATIENCE)
            else:
                with pytest.raises(DesyncError):
                    agree(member, mesh_barrier(range(3), attempt), statement, PATIENCE)

    assert on_threads(3, meet) == [None] * 3


def test_the_host_of_the_store_leaves_a_failed_barrier_last():
    def meet(member: Member) -> None:
        time.sleep(0.4 * member.rank)
        agree(member, mesh_barrier(range(4)), f"differs {member.rank}", PATIENCE)

    store = CountingStore()
    on_threads(4, meet, store)
    left = [(rank == 0, by) for rank, key, by in store.added if key.endswith("/left")]
    assert left.count((False, 1)) == 3
    assert left[-1] == (True, 0)  # the host looks once more after the last of them has said that it goes


def test_what_connects_ends_in_time_where_nobody_answers(monkeypatch):
    monkeypatch.setattr(agreement, "_LINGER_SECONDS", 0.1)
    monkeypatch.setattr(agreement, "_SILENCE_SECONDS", 0.1)
    member, limit, never = Member(dist.HashStore(), 0), timedelta(seconds=0.1), threading.Event()
    assert in_time(member, "a group", limit, lambda: 7) == 7
    with pytest.raises(MeshError, match="of its own"):
        in_time(member, "a group", limit, declined)
    try:
        with pytest.raises(dist.DistNetworkError, match=r"no answer within 0\.3 s"):
            in_time(member, "a group", limit, never.wait)
    finally:
        never.set()


def declined():
    raise MeshError("of its own")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True))
def test_a_digest_stands_for_ranks_in_their_order(ranks):
    assert digest(tuple(ranks)) == digest(list(ranks))
    others = itertools.islice(itertools.permutations(ranks), 1, 24)
    assert all(digest(other) != digest(ranks) for other in others)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 5))
def test_a_range_has_the_digest_of_its_ranks(start, count, step):
    ranks = range(start, start + count * step, step)
    assert digest(ranks) == digest(tuple(ranks))


# ------------------------------------------------------------------------------ real processes


def error_of(fn: Callable[[], object]) -> str:
    """The text of the `DesyncError` that `fn` raises. One that came when the time was up says "within ... s"."""
    with pytest.raises(DesyncError) as caught:
        fn()
    return str(caught.value)


def declare_differently(timeout):
    rank = dist.get_rank()
    declarations = {1: "tp dp=2", 2: "dp=4 tp"}
    found = [
        error_of(lambda: axes.init_mesh(declarations.get(rank, "dp=2 tp"), timeout=timeout)),
        error_of(lambda: axes.init_mesh("dp=2 tp" if rank else "tp=2 dp", timeout=timeout)),
        error_of(
            lambda: axes.init_mesh(
                "dp=2 tp",
                timeout=timeout,
                options={"tp": axes.GroupOptions(timeout=30 + rank // 3)},
            )
        ),
        error_of(lambda: axes.init_mesh("dp tp=1", device_type="cpu", timeout=timeout, **odd(rank))),
    ]
    axes.init_mesh("dp=2 tp", timeout=timeout)  # the world is as usable as before
    return found


def odd(rank):
    return {"ranks": [0, 1, 3, 2] if rank == 3 else [0, 1, 2, 3]}


def test_ranks_that_declare_different_meshes_all_get_both_texts(world):
    found = world(declare_differently, 4, 20.0)
    for other, swapped, options, order in found:
        assert sum(text in other for text in ("dp=2 tp=2", "tp=2 dp=2", "dp=4 tp=1")) >= 2
        assert "dp=2 tp=2" in swapped
        assert "tp=2 dp=2" in swapped
        assert "rank 0:" in swapped
        assert "options[tp]: timeout=0:00:30" in options
        assert "options[tp]: timeout=0:00:31" in options
        assert "ranks 0..3" in order
        assert "ranks 0, 1, 3, 2" in order
        assert not any("within" in text for text in (other, swapped, options, order))
    for rank, text in enumerate(["dp=2 tp=2", "tp=2 dp=2", "dp=4 tp=1", "dp=2 tp=2"]):
        assert text in found[rank][0]


def one_never_comes(timeout):
    if dist.get_rank() == 1:
        return None
    return error_of(lambda: axes.init_mesh("dp=2 tp", timeout=timeout))


def test_a_rank_that_never_comes_to_init_mesh_is_named(world):
    found = world(one_never_comes, 4, 4.0)
    assert found[1] is None
    for text in (found[0], found[2], found[3]):
        assert "rank 1 didn't come to init_mesh over ranks 0..3 within 4 s" in text
        assert "rank 1 hasn't been seen" in text


def one_never_comes_to_a_group(timeout):
    mesh = axes.init_mesh("dp=2 tp", timeout=timeout)
    if dist.get_rank() == 3:
        return None
    if dist.get_rank() == 2:
        return error_of(lambda: mesh.axis("tp").group)
    return mesh.axis("tp").group.size()


def test_a_rank_that_never_comes_to_a_group_is_named_with_where_it_was(world):
    found = world(one_never_comes_to_a_group, 4, 4.0)
    assert found[:2] == [2, 2]
    text = found[2]
    assert "rank 3 didn't come to the group of ranks 2, 3 ('tp') within 4 s" in text
    assert "rank 3 was last seen passing in init_mesh over ranks 0..3" in text


def opposite_orders(timeout):
    mesh = axes.init_mesh("dp=2 tp", timeout=timeout)
    first, second = ("tp", "dp") if dist.get_rank() in (0, 3) else ("dp", "tp")

    return error_of(lambda: [mesh.axis(name).group for name in (first, second)])


def test_first_uses_in_opposite_orders_name_the_waits_and_create_groups(world):
    for rank, text in enumerate(world(opposite_orders, 4, 3.0)):
        waits, held = ("tp", "dp") if rank in (0, 3) else ("dp", "tp")
        assert re.search(rf"rank \d didn't come to the group of ranks \d, \d \('{waits}'\) within 3 s", text), text
        assert re.search(rf"  rank \d .* the group of ranks \d, \d \('{held}'\)", text), text
        assert "mesh.create_groups" in text


def groups_made_beforehand():
    mesh = axes.init_mesh("dp=2 tp")
    names = ("tp", "dp") if dist.get_rank() in (0, 3) else ("dp", "tp")
    mesh.create_groups(*names)
    return [mesh.axis(name).group.size() for name in names]


def test_create_groups_makes_the_order_of_use_free(world):
    assert world(groups_made_beforehand, 4) == [[2, 2]] * 4


def a_name_that_is_wrong_on_one_rank(timeout):
    mesh = axes.init_mesh("dp=2 tp", timeout=timeout)
    began, said = time.monotonic(), ""
    try:
        mesh.create_groups("tp", *(["zz"] if dist.get_rank() == 1 else []))
    except AxesError as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    return said, took, axes.psum(torch.ones(1), "tp", mesh=mesh).item()


def test_a_name_that_is_wrong_on_one_rank_is_told_to_the_others_of_its_first_group(world):
    (zero, took, later), (one, *_), *others = world(a_name_that_is_wrong_on_one_rank, 4, 30.0)
    assert zero.startswith(
        "DesyncError: rank 1 can't take part in the group of ranks 0, 1 ('tp'), it raised MeshError: "
    )
    assert took < 10
    assert one.startswith("MeshError: the mesh has no axis 'zz'")
    assert zero.endswith(one)
    assert [said for said, *_ in others] == ["", ""]
    assert later == 2  # the group is made at its first use


def overlapping_universes(timeout):
    ranks = range(4) if dist.get_rank() < 2 else range(1, 4)
    return error_of(lambda: axes.init_mesh("dp", ranks=ranks, timeout=timeout))


def test_ranks_of_different_universes_that_wait_for_one_another_are_told(world):
    for text in world(overlapping_universes, 4, 3.0):
        assert "init_mesh over ranks 0..3" in text
        assert "init_mesh over ranks 1..3" in text


def one_declares_itself_outside(timeout):
    ranks = range(3) if dist.get_rank() < 2 else range(2)
    if dist.get_rank() == 2:
        return axes.init_mesh("dp", ranks=ranks, timeout=timeout).coordinate
    return error_of(lambda: axes.init_mesh("dp", ranks=ranks, timeout=timeout))


def test_a_member_that_declares_ranks_without_itself_is_named(world):
    found = world(one_declares_itself_outside, 3, 4.0)  # time enough to be seen on a busy machine
    assert found[2] is None
    for text in found[:2]:
        assert "rank 2 isn't a member of what it declared last, init_mesh over ranks 0, 1" in text


def a_bad_declaration_on_one_rank(timeout):
    if dist.get_rank() == 1:
        with pytest.raises(axes.AxesError) as caught:
            axes.init_mesh("dp=3 tp", timeout=timeout)
        return type(caught.value).__name__
    return error_of(lambda: axes.init_mesh("dp=2 tp", timeout=timeout))


def test_an_error_of_one_rank_reaches_the_others_at_once(world):
    found = world(a_bad_declaration_on_one_rank, 4, 20.0)
    assert found[1] == "SizeError"
    for text in (found[0], found[2], found[3]):
        assert "rank 1 can't take part in init_mesh over ranks 0..3, it raised SizeError" in text
        assert "within" not in text


def a_bad_declaration_on_all_ranks():
    found = []
    for declaration in ("dp=3 tp", "dp=2 tp"):
        try:
            found.append(axes.init_mesh(declaration).shape["tp"])
        except axes.SizeError:
            found.append("its own error")
    return found


def test_the_same_error_on_all_ranks_is_that_error_and_no_desync(world):
    assert world(a_bad_declaration_on_all_ranks, 4) == [["its own error", 2]] * 4


def two_orders_of_one_group(timeout):
    # In a world of three; in one of two the first order is the default group, which always exists.
    forth = axes.init_mesh("dp", ranks=[0, 1], timeout=timeout)
    back = axes.init_mesh("dp", ranks=[1, 0], timeout=timeout)
    if dist.get_rank() == 2:
        return None
    return error_of(lambda: (back if dist.get_rank() else forth).axis("dp").group)


def test_members_that_order_a_group_differently_are_told_at_once(world):
    for text in world(two_orders_of_one_group, 3, 20.0)[:2]:
        assert "ranks 0, 1 in this order" in text
        assert "ranks 1, 0 in this order" in text
        assert "within" not in text


def islands():
    rank = dist.get_rank()
    for _ in range(rank):
        axes.init_mesh("x", ranks=[rank])
    if rank >= 2:
        axes.init_mesh("dp", ranks=[2, 3])
        axes.init_mesh("dp", ranks=[3, 2])
    return axes.init_mesh("dp=2 tp").shape["tp"]


def test_ranks_that_declared_other_meshes_before_still_meet(world):
    assert world(islands, 4) == [2] * 4


def the_host_leaves():
    """A store that rank 0 hosts and takes along as soon as it has its error."""
    rank = dist.get_rank()
    port = [0]
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if rank != 0:
        store = dist.TCPStore("localhost", port[0], is_master=False, wait_for_workers=False)
    member = Member(store, rank)
    time.sleep(0.3 * rank)
    text = error_of(lambda: agree(member, mesh_barrier(range(3)), f"rank {rank}", PATIENCE))
    if rank == 0:
        del member, store
    return text


def test_all_ranks_get_the_error_before_the_host_of_the_store_goes(world):
    for rank, text in enumerate(world(the_host_leaves, 3)):
        assert "ranks disagree" in text
        assert f"rank {rank}" in text


def the_host_dies():
    rank = dist.get_rank()
    port = [0]
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    if rank == 0:
        time.sleep(1)
        return "gone"
    store = dist.TCPStore("localhost", port[0], is_master=False, wait_for_workers=False)
    return error_of(lambda: agree(Member(store, rank), mesh_barrier(range(2)), "x", PATIENCE))


def test_a_store_that_is_gone_is_an_error_that_says_so(world):
    found = world(the_host_dies, 2)
    assert "store can't be reached in init_mesh" in found[1]
    assert "Its host may have ended, and says why: the launcher" in found[1]


def no_store():
    """Starts a world where nobody listens."""
    dist.destroy_process_group()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)
    return error_of(lambda: axes.init_mesh("dp", device_type="cpu", timeout=0.5))


def test_a_start_without_a_store_is_an_error_that_says_so(world):
    assert "the job's store can't be reached in the start of torch.distributed: The client" in world(no_store, 1)[0]


def one_comes_with_an_error(options, started):
    """Rank 1 declares its mesh with these options, in a running world or in one that init_mesh starts."""
    if not started:
        dist.destroy_process_group()
    try:
        axes.init_mesh("dp=3", **({"device_type": "cpu", "timeout": 20.0} | (options if ranked() == 1 else {})))
    except axes.AxesError as error:
        return type(error).__name__, str(error)
    return None


def ranked() -> int:
    return int(os.environ["RANK"])


class Odd:
    """Ranks that can't be listed."""

    def __iter__(self):
        raise MeshError("these ranks can't be listed")


@pytest.mark.parametrize("started", [True, False], ids=["running", "started here"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_type": "nonsense"}, "torch.distributed has no backend for device type 'nonsense'"),
        ({"device_type": 7}, "device_type is a name without an index"),
        ({"timeout": -1}, "timeout is a positive timedelta"),
        ({"ranks": Odd()}, "ranks is a sequence of distinct integers; found"),
        ({"ranks": 5}, ""),
        ({"ranks_per_node": 0}, ""),
        ({"options": {"dp": 3}}, "options['dp'] is a GroupOptions"),
    ],
    ids=["device", "index", "timeout", "ranks", "number", "node", "options"],
)
def test_every_error_of_one_rank_in_init_mesh_reaches_the_others_at_once(world, options, said, started):
    found = world(one_comes_with_an_error, 3, options, started)
    kind, text = found[1]
    assert kind == "MeshError"
    assert said in text
    for kind, other in (found[0], found[2]):
        assert kind == "DesyncError"
        assert "rank 1 can't take part in" in other
        assert "it raised MeshError: " + text.split("\n")[0] in other
        assert "within" not in other


def ranks_of_unlike_nodes():
    os.environ["LOCAL_WORLD_SIZE"] = "2" if ranked() else "1"
    try:
        axes.init_mesh("dp=4", timeout=20.0)
    except DesyncError as error:
        found = str(error)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    said = axes.init_mesh("dp=4", ranks_per_node=1).ranks_per_node
    several = axes.init_mesh("dp=4").ranks_per_node
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    return found, said, several, axes.init_mesh("dp=4").ranks_per_node


def test_the_launcher_says_how_many_ranks_a_node_has(world):
    for found, *nodes in world(ranks_of_unlike_nodes, 4):
        assert "ranks_per_node=1" in found
        assert "ranks_per_node=2" in found
        assert nodes == [1, 2, None]


def the_host_is_stopped(phase):
    """Rank 1 stops the host of the store, and lets it go on once it has its error."""
    port, pids = [0], [None] * 2
    if ranked() == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    dist.all_gather_object(pids, os.getpid())
    if ranked() == 0:
        dist.barrier()
        dist.recv(torch.zeros(1), src=1)
        return None
    store = dist.TCPStore("localhost", port[0], is_master=False, wait_for_workers=False)
    member, barrier, limit = Member(store, 1), mesh_barrier(range(2)), 2 * SECOND
    dist.barrier()
    stop = threading.Timer(0.0 if phase == "before" else 0.7, os.kill, (pids[0], signal.SIGSTOP))
    stop.start()
    if phase != "meanwhile":
        stop.join()
    try:
        if phase == "refuse":
            refuse(member, barrier, ValueError("its own"))
            return "refused"
        return error_of(lambda: agree(member, barrier, "x", limit))
    finally:
        os.kill(pids[0], signal.SIGCONT)
        dist.send(torch.zeros(1), dst=0)


@pytest.mark.parametrize("phase", ["before", "meanwhile", "refuse"])
def test_a_store_whose_host_is_stopped_is_waited_for_no_longer_than_the_limit(world, phase):
    """Without a limit the rank never gets its error, and the host is never let go on."""
    said = world(the_host_is_stopped, 2, phase)[1]
    if phase == "refuse":
        assert said == "refused"
    else:
        assert re.search(r"the job's store at localhost:\d+ doesn't answer in init_mesh, for \d+\.\d s now", said)
