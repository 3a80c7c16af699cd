"""Tensors that cross the border alone: whole ones by `shard` and `unshard`, each rank's own by `from_local` and `to_local`.

Gradients are compared with one device's on real ranks, for plain code that uses its copies alike, and for code in which
each rank uses them in its own way; axis by axis, and with second and third derivatives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import ShardingError
from tests.test_second_derivatives import curved, derivatives, difference, loss_of, numbers, whole_of

REPLICATED = ("cp", "tp")


def shares(alike: Sequence[str], mesh: axes.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank multiplies by, which differs along the axes that aren't `alike`; and the sum along these."""
    own = [axis for axis in REPLICATED if axis not in alike]
    sizes = [mesh.shape[axis] for axis in own]
    table = (torch.arange(1.0, 5.0).double() * 2 - 3)[: sizes[0] * sizes[1] if len(own) == 2 else 2 if own else 1]
    index = 0
    for axis, size in zip(own, sizes, strict=True):
        index = index * size + mesh.coordinate[axis]
    return table[index], table.sum()


def how(alike: Sequence[str], spec: str, by_spec: bool) -> tuple[str | None, str | None]:
    """`spec` and `grad` that say which axes are used alike."""
    if not by_spec and len(alike) == 2:
        return None, "whole"
    if not by_spec and not alike:
        return None, "summed"
    place = f"({' '.join(alike)})"
    return (f"{spec} | same@{place}", None if len(alike) == 2 else "summed") if alike else (spec, "summed")


ALIKE = [(), ("cp",), ("tp",), ("cp", "tp")]


def crossings() -> dict[str, float]:
    """How far three derivatives are off where a tensor leaves or enters, split over dp and else replicated."""
    torch.set_num_threads(1)
    found = {}
    with axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu") as mesh:
        whole = numbers((7, 3), 1).requires_grad_()
        for alike, by_spec in itertools.product(ALIKE, (False, True)):
            share, total = shares(alike, mesh)
            spec, grad = how(alike, "n@dp d", by_spec)
            # Out: plain code on this rank's shard, whose losses along dp and own axes add up.
            x = axes.shard(whole.detach(), "n@dp d").requires_grad_()
            loss = (share * curved(axes.to_local(x, spec, grad=grad))).sum()
            expected = derivatives((total * curved(whole)).sum(), whole)
            found[f"out, {alike}, {by_spec}"] = max(difference(derivatives(loss, x), expected))
            # In: what each rank has made of its copy; what is its own is summed by a collective.
            own = tuple(axis for axis in REPLICATED if axis not in alike)
            x = axes.shard(whole.detach(), "n@dp d").requires_grad_()
            local = curved(axes.to_local(x, spec, grad=grad)) * share
            local = axes.psum(local, own) if own else local
            y = axes.from_local(curved(local), spec or "n@dp d", shape=(7, 3), grad=grad)
            expected = derivatives(loss_of(curved(total * curved(whole)), ""), whole)
            for arrival in ("whole", "split"):
                found[f"in, {alike}, {by_spec}, {arrival}"] = max(
                    difference(derivatives(loss_of(y, arrival), x), expected)
                )
    return found


def test_a_tensor_that_leaves_or_enters_alone_has_the_gradients_of_one_device(pool):
    for found in pool.run(crossings, timeout=120):
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}


def plain_leaves() -> None:
    """The gradient that a plain leaf gets, and that of a plain loss."""
    with axes.init_mesh("tp=8", device_type="cpu") as mesh:
        x = torch.ones(4, 2, requires_grad=True)
        axes.unshard(axes.from_local(x, "b d", grad="whole")).sum().backward()
        assert x.grad.tolist() == [[1.0, 1.0]] * 4
        x.grad = None
        axes.unshard(axes.from_local(x, "b d", grad="summed")).sum().backward()
        assert axes.psum(x.grad, "tp").tolist() == [[1.0, 1.0]] * 4
        w = axes.ones("d", d=2, requires_grad=True)
        axes.to_local((w * 3).sum(), grad="whole").backward()
        assert axes.unshard(w.grad).tolist() == [3.0, 3.0]
        # Nothing to ask: split, pending, without a gradient, over an axis of one rank, or under no_grad.
        axes.to_local(axes.ones("d@tp", d=8, requires_grad=True)).sum().backward()
        axes.from_local(x, "b d | sum@tp")
        axes.from_local(x, "b@tp d")
        axes.from_local(x.detach(), "b d")
        axes.to_local(w.detach())
        axes.from_local(x, "b d", mesh=axes.init_mesh("one=1 all=8", device_type="cpu")["one"])
        with torch.no_grad():
            assert not axes.from_local(x, "b d").requires_grad
            axes.to_local(w)
        # What is said where nothing is to ask changes nothing.
        for grad in ("whole", "summed", None):
            y = axes.from_local(x, "b@tp d", grad=grad)
            assert axes.to_local(y, "b@tp d", grad=grad).shape == (4, 2)
        assert axes.to_local(w.detach(), "d | same@tp").tolist() == [1.0, 1.0]
        assert mesh.size == 8


def test_what_a_plain_leaf_and_a_plain_loss_get(pool):
    pool.run(plain_leaves)


# --- refused


def refused() -> list[str]:
    found = []
    with axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu"), CommDebugMode() as sent:
        x = torch.ones(4, 2, requires_grad=True)
        w = axes.ones("b@dp d", b=8, d=2, requires_grad=True)
        calls: list[Callable[[], object]] = [
            lambda: axes.from_local(x, "b d"),
            lambda: axes.from_local(x, "b@(dp cp) d"),
            lambda: axes.from_local(x, "b d | sum@tp", grad=None),
            lambda: axes.from_local(x, "b@dp d | same@tp"),
            lambda: axes.to_local(w),
            lambda: axes.to_local(w, "b@dp d | same@cp"),
            lambda: axes.to_local(w, "b d"),
            lambda: axes.to_local(w, "b@dp"),
            lambda: axes.to_local(w, "b@dp d | same@dp"),
            lambda: axes.from_local(x, "b@tp d | same@tp"),
            lambda: axes.to_local(w, grad="sum"),
            lambda: axes.from_local(x.detach(), "b d", grad=True),
        ]
        for call in calls:
            with pytest.raises(ShardingError) as caught:
                call()
            found.append(str(caught.value))
    assert not sent.get_total_counts()
    return found


QUESTION = """axes.from_local: the tensor needs a gradient and is replicated over 'tp' (2 ranks). Its copies are used
  - by every rank in the same way, so that each has the whole gradient, as torch's own to_local and from_local take it:
      axes.from_local(local, 'b@(dp cp) d', grad="whole")
  - by each rank in its own way, so that the gradients add up:
      axes.from_local(local, 'b@(dp cp) d', grad="summed")
Write which it is. For some of the axes alone, same@ in the spec says that the gradient is whole, as in
      'b@(dp cp) d | same@tp'"""


def test_what_gradient_it_is_has_to_be_said_and_both_ways_are_shown(pool):
    by_rank = pool.run(refused)
    assert all(found == by_rank[0] for found in by_rank)
    whole, one, pending, rest, out, cp, spec, dims, split, entering, grad, not_text = by_rank[0]
    assert "replicated over 'dp' (2 ranks) and 'cp' (2 ranks) and 'tp' (2 ranks)" in whole
    assert "'b d | same@(dp cp tp)'" in whole
    assert one == QUESTION
    assert "'b d | sum@tp same@(dp cp)'" in pending
    assert "replicated over 'cp' (2 ranks)." in rest
    assert "axes.from_local(local, 'b@dp d | same@tp', grad=\"summed\")" in rest
    assert "'b@dp d | same@tp same@cp'" in rest
    assert 'axes.to_local(x, grad="whole")' in out
    assert "'_@dp _ | same@(cp tp)'" in out
    assert "replicated over 'tp' (2 ranks)." in cp
    assert "isn't sharded as the spec says\n  spec    b d\n  tensor  _@dp _" in spec
    assert "axes.reshard(x, 'b d')" in spec
    assert "the spec 'b@dp' has 1 dims, the tensor 2: [8, 2]" in dims
    assert "axis 'dp' is used twice" in split
    assert "axis 'tp' is used twice" in entering
    assert grad == "axes.to_local: grad is 'whole' or 'summed'; found 'sum'"
    assert not_text == "axes.from_local: grad is 'whole' or 'summed'; found True"


# --- whole tensors


CUTS = ["n d", "n@tp d", "n@(dp tp) d@cp", "(three=3 h@tp) d", "n d@(cp tp)"]


def inside_a_computation() -> dict[str, float]:
    """How far derivatives through `shard` are off, of a plain tensor that every rank computes."""
    torch.set_num_threads(1)
    found = {}
    with axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu"):
        for spec, arrival in itertools.product(CUTS, ("whole", "split", "pending")):
            shape = (12 if "three" in spec else 7, 5)
            whole = numbers(shape, 1).requires_grad_()
            expected = derivatives(loss_of(curved(curved(whole)), ""), whole)
            leaf = whole.detach().clone().requires_grad_()
            y = axes.shard(curved(leaf), spec)
            assert not y.is_leaf
            y = axes.reshard(y, "... |") if arrival == "pending" and spec.count("@") > 1 else y
            if arrival == "pending" and "tp" in axes.spec_of(y):
                continue  # which the loss would have pending over dp
            off = difference(derivatives(loss_of(curved_shards(y), arrival), leaf), expected)
            found[f"{spec}, {arrival}"] = max(off)
    return found


def curved_shards(y: DTensor) -> DTensor:
    """`curved` of a DTensor, whatever splits it."""
    local = curved(axes.to_local(y, grad="whole"))
    return axes.from_local(local, axes.spec_of(y), shape=y.shape, grad="whole")


def test_a_whole_tensor_is_sharded_inside_a_computation_and_its_gradient_is_whole(pool):
    for found in pool.run(inside_a_computation, timeout=120):
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}
        assert len(found) >= 11


def leaves_of_shard() -> None:
    with axes.init_mesh("dp=4 tp=2", device_type="cpu"):
        leaf = torch.ones(4, requires_grad=True)
        made = axes.shard(leaf, "n@tp")
        assert made.is_leaf
        assert made.requires_grad
        (made * 2).sum().full_tensor().backward()
        assert leaf.grad is None
        assert axes.unshard(made.grad).tolist() == [2.0] * 4
        with torch.no_grad():
            assert not axes.shard(leaf * 2, "n@tp").requires_grad
        x = leaf * 2
        y = axes.shard(x, "n")  # of which the whole is a copy as well
        axes.to_local(y.detach()).zero_()
        assert x.tolist() == [2.0] * 4
        with pytest.raises(ShardingError, match="leave out source_rank"):
            axes.shard(x, "n@tp", source_rank=0)
        with pytest.raises(ShardingError, match="a whole tensor has nothing pending"):
            axes.shard(x, "n | sum@tp")


def test_shard_makes_a_leaf_of_a_leaf(pool):
    pool.run(leaves_of_shard)


# --- in torch.compile


def crossed(x: DTensor, w: DTensor, v: torch.Tensor) -> list[DTensor]:
    """Every way across the border: `w` and `v` are leaves, `v` a plain one that every rank has."""
    rows = axes.to_local(x.cos(), "b@dp d | same@tp")
    alike = axes.to_local(w, grad="whole").sin()
    own = axes.to_local(w.sin(), grad="summed") * rows.sum()
    return [
        axes.from_local(rows * 2, "b@dp d", shape=(x.shape[0], x.shape[1]), grad="whole"),
        axes.from_local(alike, "d", grad="whole"),
        axes.from_local(own, "d | sum@dp same@tp"),
        axes.shard(v.sin() * v, "n@tp d"),
        axes.shard(alike * v.sum(), "d@(dp tp)"),
    ]


def compiled() -> tuple[list[str], int]:
    wrong = []
    with axes.init_mesh("dp=2 tp=2", device_type="cpu"):
        torch._dynamo.reset()
        counted = CompileCounterWithBackend("aot_eager")
        fast = torch.compile(crossed, fullgraph=True, backend=counted, dynamic=True)
        for size in (12, 28, 36):  # none of the others that tensors have here: equal ones are one symbol
            found = []
            for call in (crossed, fast):
                x = axes.shard(numbers((size, 10), 1), "b@dp d").requires_grad_()
                w = axes.shard(numbers((8,), 2), "d").requires_grad_()
                v = numbers((size, 5), 3).requires_grad_()
                results = call(x, w, v)
                sum((axes.unshard(y) ** 2).sum() for y in results).backward()
                found.append([axes.unshard(y.detach()) for y in results] + [whole_of(t.grad) for t in (x, w, v)])
                specs = [axes.spec_of(y) for y in (*results, x.grad, w.grad)]
            wrong += [f"{size}: {specs}"] if any(d > 1e-12 for d in difference(*found)) else []
        return wrong, counted.frame_count


def test_in_a_graph_tensors_cross_as_in_eager_mode(warm):
    for wrong, graphs in warm(compiled, 4, timeout=240):
        assert wrong == []
        assert graphs == 1


def refused_in_a_graph() -> list[str]:
    found = []
    with axes.init_mesh("tp=2", device_type="cpu"):
        w = axes.ones("d", d=4, requires_grad=True)
        x = torch.ones(4, requires_grad=True)
        for call, tensor in (
            (axes.to_local, w),
            (lambda x: axes.from_local(x, "d"), x),
            (lambda w: axes.to_local(w, "d@tp"), w),
            (lambda w: axes.to_local(w, grad="all"), w),
            (lambda x: axes.shard(x * 2, "d | sum@tp"), x),
        ):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=r".") as caught:
                torch.compile(call, backend="aot_eager", fullgraph=True)(tensor)
            found.append(str(caught.value))
        # A new leaf is made outside of the graph, which breaks for it.
        torch._dynamo.reset()
        made = torch.compile(lambda x: axes.shard(x, "d@tp"), backend="aot_eager")(x)
        assert made.is_leaf
        assert made.requires_grad
    return found


def test_mistakes_say_in_a_graph_what_they_say_in_eager_mode(warm):
    for leave, enter, spec, grad, pending in warm(refused_in_a_graph, 2, timeout=120):
        assert "axes.to_local: the tensor needs a gradient and is replicated over" in leave
        assert "axes.from_local: the tensor needs a gradient and is replicated over" in enter
        assert "isn't sharded as the spec says" in spec
        assert "grad is 'whole' or 'summed'; found" in grad
        assert "a whole tensor has nothing pending" in pending
