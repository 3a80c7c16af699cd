"""Functions over split dims, against the function of one device: values, gradients and what is sent."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, ExpressionError, MeshError, ShardingError, SizeError
from axes.nn.functions import cross_entropy, embedding, layer_norm, logsumexp, rms_norm, softmax

PLACES = ["", "@tp", "@(tp cp)", "@(dp rest)"]


def mesh() -> axes.Mesh:
    return axes.init_mesh("dp=2 cp=2 tp=2", "rest = cp tp", device_type="cpu")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * 3


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def agree(function, reference, tensors: dict[str, torch.Tensor], result: str = "", tolerance: float = 1e-10) -> None:
    """`function(*DTensors)` and `reference(*tensors)` have the same values and the same gradients.

    tensors: each by its spec (a blank at its end makes a spec a second key).
    """
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors.values()]
    shards = [axes.shard(x.clone().requires_grad_(x.is_floating_point()), spec) for spec, x in tensors.items()]
    y, wanted = function(*shards), reference(*leaves)
    if result:
        assert axes.spec_of(y) == result
    close(axes.unshard(y), wanted, tolerance)
    weight = numbers(*wanted.shape, seed=99, dtype=wanted.dtype)
    (axes.unshard(y) * weight).sum().backward()
    (wanted * weight).sum().backward()
    for shard, leaf in zip(shards, leaves, strict=True):
        if leaf.requires_grad:
            close(axes.unshard(shard.grad), leaf.grad, tolerance)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.detach(), wanted.detach(), rtol=tolerance, atol=tolerance)


# softmax and logsumexp


def softmaxes(place: str) -> None:
    with mesh():
        other = "" if "dp" in place else "@dp"
        spec = f"q{other} k{place}"
        agree(lambda x: softmax(x, spec, over="k"), lambda x: x.softmax(1), {spec: numbers(4, 16)})
        agree(lambda x: logsumexp(x, spec, over="k"), lambda x: x.logsumexp(1), {spec: numbers(4, 16)})
        spec = f"k{place} ..."
        agree(
            lambda x: softmax(x, spec, over=["k"]), lambda x: x.softmax(0), {f"k{place} a b{other}": numbers(8, 3, 2)}
        )
        spec = f"... k{place} j"
        both = {f"a k{place} j": numbers(3, 8, 5)}
        agree(lambda x: logsumexp(x, spec, over="j k"), lambda x: x.logsumexp((1, 2)), both)
        agree(lambda x: softmax(x, spec, over="k j"), lambda x: x.flatten(1).softmax(1).view(3, 8, 5), both)
        flat = {f"k{place}": numbers(8, dtype=torch.bfloat16)}
        agree(lambda x: softmax(x, f"k{place}", over="k"), lambda x: x.softmax(0), flat, tolerance=2e-2)


@pytest.mark.parametrize("place", PLACES)
def test_softmax_and_logsumexp_over_a_split_dim_are_those_of_one_device(pool, place):
    pool.run(softmaxes, place)


def extremes() -> None:
    with mesh():
        # what no exponential can hold, rows of minus infinity, shards that are empty
        x = numbers(4, 8) + 800
        agree(lambda x: logsumexp(x, "q k@rest", over="k"), lambda x: x.logsumexp(1), {"q k@rest": x})
        x[0] = -math.inf
        found = logsumexp(axes.shard(x, "q k@tp"), "q k@tp", over="k")
        assert axes.unshard(found)[0] == -math.inf
        assert not axes.unshard(found)[1:].isinf().any()
        x[1, 3] = math.inf
        assert axes.unshard(logsumexp(axes.shard(x, "q k@tp"), "q k@tp", over="k"))[1] == math.inf
        split, labels = axes.shard(x, "q k@tp"), axes.shard(torch.zeros(len(x), dtype=torch.int64), "q")
        assert axes.unshard(softmax(split, "q k@tp", over="k"))[1].isnan().all()
        assert axes.unshard(cross_entropy(split, labels, "q k@tp, q -> q"))[1].isnan()
        odd = {"q k@dp": numbers(3, 5)}
        agree(lambda x: softmax(x, "q k@dp", over="k"), lambda x: x.softmax(1), odd)
        few = {"q k@tp": numbers(3, 1)}
        agree(lambda x: softmax(x, "q k@tp", over="k"), lambda x: x.softmax(1), few)
        agree(lambda x: logsumexp(x, "q k@tp", over="k"), lambda x: x.logsumexp(1), few)


def test_large_infinite_and_missing_values_are_as_on_one_device(pool):
    pool.run(extremes)


# norms


def norms(place: str) -> None:
    with mesh():
        other = "" if "dp" in place else "@dp"
        spec, w = f"b{other} s d{place}", f"d{place}"
        x = numbers(4, 3, 16)
        agree(lambda x: rms_norm(x, spec, over="d"), lambda x: F.rms_norm(x, (16,)), {spec: x})
        one = {spec: x, w: numbers(16, seed=1)}
        agree(
            lambda x, w: rms_norm(x, spec, over="d", weight=w, eps=0.1), lambda x, w: F.rms_norm(x, (16,), w, 0.1), one
        )
        two = one | {w + " ": numbers(16, seed=2)}
        agree(lambda x: layer_norm(x, spec, over="d"), lambda x: F.layer_norm(x, (16,)), {spec: x})
        agree(lambda x, w: layer_norm(x, spec, over="d", weight=w), lambda x, w: F.layer_norm(x, (16,), w), one)
        agree(lambda x, w, b: layer_norm(x, spec, "d", w, b), lambda x, w, b: F.layer_norm(x, (16,), w, b), two)
        agree(lambda x, b: layer_norm(x, spec, "d", bias=b), lambda x, b: F.layer_norm(x, (16,), None, b), one)
        wide = {f"b h{place} d": numbers(3, 8, 5), f"h{place} d": numbers(8, 5, seed=1)}
        agree(lambda x, w: rms_norm(x, f"b h{place} d", "h d", w), lambda x, w: F.rms_norm(x, (8, 5), w), wide)
        swapped = {f"d{place} b": numbers(8, 3), f"d{place}": numbers(8, seed=1)}
        agree(lambda x, w: rms_norm(x, f"d{place} b", "d", w), lambda x, w: F.rms_norm(x.mT, (8,), w).mT, swapped)
        half = {spec: x.to(torch.bfloat16)}
        agree(lambda x: layer_norm(x, spec, over="d"), lambda x: F.layer_norm(x, (16,)), half, tolerance=5e-2)


@pytest.mark.parametrize("place", PLACES)
def test_norms_over_a_split_dim_are_those_of_one_device(pool, place):
    pool.run(norms, place)


def uneven_norms() -> None:
    with mesh():
        x = {"s d@dp": numbers(3, 5) + 100, "d@dp": numbers(5, seed=1)}
        agree(lambda x, w: rms_norm(x, "s d@dp", "d", w), lambda x, w: F.rms_norm(x, (5,), w), x)
        agree(lambda x, w: layer_norm(x, "s d@dp", "d", w), lambda x, w: F.layer_norm(x, (5,), w), x, tolerance=1e-9)


def test_norms_count_the_elements_of_uneven_shards(pool):
    pool.run(uneven_norms)


# losses


def flat(function):
    """A function of `b v, b` as one of `b s v, b s`."""
    return lambda x, y: function(x.flatten(0, 1), y.flatten())


def rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.mT, y, reduction="none").sum(1)


def losses(place: str) -> None:
    with mesh():
        b = "" if "dp" in place else "@dp"
        logits, labels = numbers(4, 3, 16), integers(16, 4, 3)
        labels[1, 2] = labels[3, 0] = -100
        both = {f"b{b} s v{place}": logits, f"b{b} s": labels}
        head = f"b{b} s v{place}, b{b} s -> "
        agree(lambda x, y: cross_entropy(x, y, head), flat(F.cross_entropy), both)
        summed = flat(lambda x, y: F.cross_entropy(x, y, reduction="sum"))
        agree(lambda x, y: cross_entropy(x, y, head, reduction="sum"), summed, both)
        each = flat(lambda x, y: F.cross_entropy(x, y, reduction="none").view(4, 3))
        agree(lambda x, y: cross_entropy(x, y, head + f"b{b} s"), each, both)
        agree(lambda x, y: cross_entropy(x, y, head + f"b{b}", reduction="sum"), rows, both)
        if b:
            agree(lambda x, y: cross_entropy(x, y, head + "| sum@dp"), flat(F.cross_entropy), both, "| sum@dp")
        other = {f"v{place} b{b}": numbers(16, 4), f"b{b}": integers(16, 4)}
        agree(
            lambda x, y: cross_entropy(x, y, f"v{place} b{b}, b{b} -> ", ignore_index=3),
            lambda x, y: F.cross_entropy(x.mT, y, ignore_index=3),
            other,
        )
        half = {f"b{b} v{place}": numbers(4, 16, dtype=torch.bfloat16), f"b{b}": integers(16, 4).int()}
        agree(
            lambda x, y: cross_entropy(x, y, f"b{b} v{place}, b{b} -> "),
            lambda x, y: F.cross_entropy(x, y.long()),
            half,
            tolerance=5e-2,
        )


@pytest.mark.parametrize("place", PLACES)
def test_a_loss_over_a_split_vocabulary_is_that_of_one_device(pool, place):
    pool.run(losses, place)


def odd_losses() -> None:
    with mesh():
        for size in (5, 1):  # an uneven vocabulary, and one of which a rank has nothing
            both = {"b v@tp": numbers(4, size), "b": integers(size, 4)}
            agree(lambda x, y: cross_entropy(x, y, "b v@tp, b -> "), F.cross_entropy, both)
        x, y = axes.shard(numbers(3, 8), "b v@tp"), axes.shard(torch.tensor([0, 8, -1]), "b")
        found = axes.unshard(cross_entropy(x, y, "b v@tp, b -> b"))
        assert found.isnan().tolist() == [False, True, True]
        none = axes.shard(torch.full((3,), -100), "b")
        assert axes.unshard(cross_entropy(x, none, "b v@tp, b -> ")).isnan()
        assert axes.unshard(cross_entropy(x, none, "b v@tp, b -> ", reduction="sum")) == 0
        # b flows where it is kept
        both = {"b@dp v@tp": numbers(4, 8), "b@dp": integers(8, 4)}
        agree(
            lambda x, y: cross_entropy(x, y, "b v@tp, b -> b"),
            lambda x, y: F.cross_entropy(x, y, reduction="none"),
            both,
            "_@dp",
        )


def test_uneven_vocabularies_ignored_and_impossible_labels(pool):
    pool.run(odd_losses)


# embeddings


def embeddings(place: str) -> None:
    with mesh():
        b = "" if "dp" in place else "@dp"
        both = {f"b{b} s": integers(16, 4, 8), f"v{place} d": numbers(16, 3)}
        left = f"b{b} s, v{place} d"
        agree(lambda i, t: embedding(i, t, f"{left} -> b{b} s d"), F.embedding, both)
        if place:
            agree(lambda i, t: embedding(i, t, f"{left} -> b{b} s{place} d"), F.embedding, both)
            agree(lambda i, t: embedding(i, t, f"{left} -> b{b} s d | *"), F.embedding, both)
        columns = {f"b{b} s": integers(16, 4, 8), f"d{place} v": numbers(8, 16)}
        agree(
            lambda i, t: embedding(i, t, f"b{b} s, d{place} v -> b{b} s d{place}"),
            lambda i, t: F.embedding(i, t.mT),
            columns,
        )
        for row in (0, 9, -1):
            agree(
                lambda i, t, row=row: embedding(i, t, f"{left} -> b{b} s d", padding_idx=row),
                lambda i, t, row=row: F.embedding(i, t, row),
                both,
            )


@pytest.mark.parametrize("place", PLACES)
def test_embeddings_of_split_rows_are_those_of_one_device(pool, place):
    pool.run(embeddings, place)


def odd_embeddings() -> None:
    with mesh():
        for size in (5, 1):
            both = {"b": integers(size, 4), "v@tp d": numbers(size, 3)}
            agree(lambda i, t: embedding(i, t, "b, v@tp d -> d b"), lambda i, t: F.embedding(i, t).mT, both)
            agree(
                lambda i, t: embedding(i, t, "b, v@tp d -> d b", padding_idx=-1),
                lambda i, t: F.embedding(i, t, -1).mT,
                both,
            )
        ids, table = axes.shard(torch.tensor([0, 5, -1]), "b"), axes.shard(numbers(5, 2), "v@tp d")
        found = axes.unshard(embedding(ids, table, "b, v@tp d -> b d"))
        assert found.isnan().all(1).tolist() == [False, True, True]


def test_uneven_tables_and_impossible_indices(pool):
    pool.run(odd_embeddings)


# plain tensors that hold a shard


def shard(x: torch.Tensor, spec: str) -> torch.Tensor:
    return axes.to_local(axes.shard(x.detach(), spec)).clone().requires_grad_(x.is_floating_point())


def plain() -> None:
    m = mesh()
    with m:
        whole, w, _scale = (numbers(4, 8, seed=i).requires_grad_() for i in range(3))
        x, local_w = shard(whole, "q k@rest"), shard(w, "q k@rest")
        vector, v = numbers(8, seed=5).requires_grad_(), shard(numbers(8, seed=5), "k@rest")
        for ours, theirs in [
            (lambda: softmax(x, "q k@rest", over="k"), lambda: whole.softmax(1)),
            (lambda: rms_norm(x, "q k@rest", "k", v), lambda: F.rms_norm(whole, (8,), vector)),
            (lambda: layer_norm(x, "q k@rest", "k", v, v), lambda: F.layer_norm(whole, (8,), vector, vector)),
        ]:
            got, wanted = ours(), theirs()
            close(got, shard(wanted, "q k@rest"), 1e-10)
            (g,) = torch.autograd.grad((got * local_w).sum(), x)
            (h,) = torch.autograd.grad((wanted * w).sum(), whole)
            close(g, shard(h, "q k@rest"), 1e-10)
        # a loss that all ranks compute together, and one that each has for itself
        labels = integers(8, 4)
        wanted = F.cross_entropy(whole, labels)
        (h,) = torch.autograd.grad(wanted, whole)
        for result, times in (("| same@rest", 1), ("", 4)):
            loss = cross_entropy(x, labels, f"q k@rest, q -> {result}")
            close(loss, wanted, 1e-10)
            close(torch.autograd.grad(loss, x)[0], shard(h, "q k@rest") * times, 1e-10)
        # mesh= and whole sizes
        table = numbers(5, 2)
    local = shard_of(m, table)
    found = embedding(integers(5, 6), local, "b, v@rest d -> b d", mesh=m["rest"], v=5)
    close(found, F.embedding(integers(5, 6), table), 1e-10)


def shard_of(m: axes.Mesh, table: torch.Tensor) -> torch.Tensor:
    return axes.to_local(axes.shard(table, "v@rest d", mesh=m["rest"])).clone()


def test_plain_shards_mean_the_same_with_the_gradients_of_the_local_view(pool):
    pool.run(plain)


def test_ordinary_tensors_need_no_mesh():
    x = numbers(3, 4)
    close(softmax(x, "q k", over="k"), x.softmax(1), 1e-12)
    close(layer_norm(x, "q k", over="k"), F.layer_norm(x, (4,)), 1e-12)
    close(cross_entropy(x, integers(4, 3), "q k, q -> "), F.cross_entropy(x, integers(4, 3)), 1e-12)
    close(embedding(integers(3, 2, 2), x, "a b, v d -> a b d"), F.embedding(integers(3, 2, 2), x), 1e-12)


# what is sent


def sends() -> list[tuple[dict[str, int], dict[str, int]]]:
    with mesh()["tp"]:
        x, v = (
            axes.shard(numbers(*shape), spec).requires_grad_() for shape, spec in (((4, 16), "b v@tp"), ((16,), "v@tp"))
        )
        y, table = axes.shard(integers(16, 4), "b"), axes.shard(numbers(16, 4), "v@tp d").requires_grad_()
        found = []
        for call in (
            lambda: softmax(x, "b v@tp", over="v"),
            lambda: logsumexp(x, "b v@tp", over="v"),
            lambda: rms_norm(x, "b v@tp", over="v", weight=v),
            lambda: layer_norm(x, "b v@tp", over="v", weight=v, bias=v),
            lambda: cross_entropy(x, y, "b v@tp, b -> "),
            lambda: embedding(y, table, "b, v@tp d -> b d"),
            lambda: embedding(y, table, "b, v@tp d -> b@tp d"),
        ):
            with CommDebugMode() as forward:
                z = call()
            loss = axes.to_local(z, grad="summed").sum()
            with CommDebugMode() as backward:
                torch.autograd.grad(loss, table if z.shape == (4, 4) else x)
            found.append(
                tuple({str(k).split(".")[-1]: n for k, n in c.get_comm_counts().items()} for c in (forward, backward))
            )
        return found


def test_what_is_sent_is_small_and_never_the_dim_itself(pool):
    softmax_, logsumexp_, rms, layer, loss, summed, scattered = pool.run(sends)[0]
    assert [sum(c.values()) for c in softmax_] == [2, 1]
    assert [sum(c.values()) for c in logsumexp_] == [2, 1]
    assert [sum(c.values()) for c in rms] == [1, 1]
    assert [sum(c.values()) for c in layer] == [2, 2]
    assert [sum(c.values()) for c in loss] == [2, 1]
    assert all(not any("gather" in name for name in c) for pair in (softmax_, rms, layer, loss) for c in pair)
    assert sum(summed[0].values()) == sum(scattered[0].values()) == 1


# mistakes

X, Y = torch.ones(3, 4), torch.tensor([0, 1, 2])
MISTAKES = [
    (
        lambda: softmax(X, "q k", over="j"),
        ExpressionError,
        "softmax is over dims of the spec by name; found 'j'; known: q, k",
    ),
    (lambda: softmax(X, "q k", over=""), ExpressionError, "softmax is over dims of the spec by name"),
    (lambda: softmax(X, "q (k j)", over="k"), ExpressionError, "softmax is over dims of the spec by name; found 'k'"),
    (lambda: softmax(X, "q k@*", over="k"), ExpressionError, "'*' doesn't say it"),
    (
        lambda: softmax(X, "q k | sum@tp", over="k"),
        ShardingError,
        "softmax isn't linear, so it can't take what is pending",
    ),
    (lambda: softmax(X, "q h k", over="k"), ShardingError, "the spec 'q h k@()' has 3 dims, the tensor 2: [3, 4]"),
    (lambda: softmax(X.tolist(), "q k", over="k"), ShardingError, "softmax takes tensors; found list"),
    (lambda: softmax(X, "q k@tp", over="k"), MeshError, "no mesh says which ranks"),
    (
        lambda: rms_norm(X, "q k", over="k", weight=torch.ones(3)),
        SizeError,
        "a weight or bias of 'k@()' is [4] here; found [3]",
    ),
    (
        lambda: rms_norm(X, "q k", over="k", q=3),
        SizeError,
        "a size is given for 'q', which isn't in the expression; known: k",
    ),
    (lambda: cross_entropy(X, Y, "b v, b"), ExpressionError, "cross_entropy is 'logits, labels -> loss'"),
    (
        lambda: cross_entropy(X, Y, "b v, s -> "),
        ExpressionError,
        "labels have the names of the logits without the vocabulary",
    ),
    (
        lambda: cross_entropy(X, Y, "b v, b -> v"),
        ExpressionError,
        "the loss has names of the labels, in the same order",
    ),
    (lambda: cross_entropy(X, Y, "b@dp v, b -> "), ExpressionError, "'b' is split the same in all"),
    (lambda: cross_entropy(X, Y, "b v@tp, b -> | sum@tp"), ExpressionError, "what a loss can leave pending"),
    (
        lambda: cross_entropy(X, Y, "b v, b -> ", reduction="none"),
        ShardingError,
        "reduction is 'mean' or 'sum'; found 'none'",
    ),
    (lambda: cross_entropy(X, X[:, 0], "b v, b -> "), ShardingError, "labels are whole numbers; found torch.float32"),
    (lambda: cross_entropy(X, Y, "b _, b -> "), ExpressionError, "cross_entropy needs a name for each dim"),
    (lambda: embedding(X, X, "a b, v d -> a b d"), ShardingError, "ids are whole numbers"),
    (
        lambda: embedding(Y, X.long(), "a, v d -> a d"),
        ShardingError,
        "a row outside of a table of torch.int64 can't be made NaN",
    ),
    (lambda: embedding(Y, X, "a, v d -> a b"), ExpressionError, "the result has the names of the ids and of the table"),
    (lambda: embedding(Y, X, "a, v d -> a d", v=7), SizeError, "'v' is 7 in whole and so 7 on this rank; found 3"),
    (lambda: embedding(Y, X, "a, v d -> a d", padding_idx=3), SizeError, "a row of the table, which has 3; found 3"),
    (lambda: embedding(Y, X, "a, v d -> a d", padding_idx=1.0), ShardingError, "padding_idx is the number of a row"),
]


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_errors_that_say_what_is_wrong(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def hidden() -> list[str]:
    with mesh():
        x, y = axes.shard(numbers(4, 8), "b@dp v@tp"), axes.shard(integers(8, 4), "b@dp")
        found = []
        for call in (
            lambda: softmax(x, "b v", over="v"),
            lambda: cross_entropy(x, y, "b v@tp, b -> "),
            lambda: cross_entropy(x, integers(8, 4), "b v@tp, b -> b"),
        ):
            try:
                call()
            except AxesError as error:
                found.append(str(error))
        return found


def test_dtensors_say_how_what_is_worked_over_is_split(pool):
    over, reduced, mixed = pool.run(hidden)[0]
    assert "left side  b v@()\n  tensor     b@dp v@tp" in over
    assert "left side  b@() v@tp\n  tensor     b@dp v@tp" in reduced
    assert "cross_entropy takes DTensors or plain tensors, not both" in mixed


def same_losses() -> None:
    with mesh():
        tensors = {"b@dp v@tp": numbers(4, 8), "b@dp": integers(8, 4)}
        for pending in ("same@dp", "same@(dp cp tp)"):
            agree(lambda x, y, p=pending: cross_entropy(x, y, f"b@dp v@tp, b@dp -> | {p}"), F.cross_entropy, tensors)


def test_a_loss_of_dtensors_may_be_same(pool):
    pool.run(same_losses)


# torch.compile


def compiled() -> None:
    m = axes.init_mesh("dp=1 tp=2", device_type="cpu")

    def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = rms_norm(softmax(x, "b v@tp", over="v"), "b v@tp", over="v", weight=w)
        return cross_entropy(h, y, "b@dp v@tp, b@dp -> ")

    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(step, fullgraph=True, backend=counter)
    found = []
    for function in (step, fast, fast):
        x = axes.shard(numbers(4, 6), "b@dp v@tp", mesh=m).requires_grad_()
        w = axes.shard(numbers(6, seed=1), "v@tp", mesh=m).requires_grad_()
        loss = function(x, axes.shard(integers(6, 4), "b@dp", mesh=m), w)
        loss.full_tensor().backward()
        found.append([t.detach().full_tensor() for t in (loss, x.grad, w.grad)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
    assert counter.frame_count == 1


def test_they_compile_into_one_graph(warm):
    warm(compiled, 2, timeout=120)


# out of range


LABELS = [0, -1, 6, -100, 3]  # the second and third are outside, the fourth is ignored
OUTSIDE = [False, True, True, False, False]


def outside_labels(place: str) -> None:
    with mesh():
        whole, labels = numbers(5, 6), torch.tensor(LABELS)
        for right, op in [("b", "sum"), ("", "mean"), ("", "sum")]:
            x = axes.shard(whole, f"b v{place}").requires_grad_()
            loss = axes.unshard(cross_entropy(x, axes.shard(labels, "b"), f"b v{place}, b -> {right}", reduction=op))
            loss.sum().backward()
            assert loss.isnan().tolist() == (OUTSIDE if right else True)
            whole_rows(axes.unshard(x.grad), OUTSIDE)
            assert axes.unshard(x.grad)[3].tolist() == [0.0] * 6
            local = shard(whole, f"b v{place}")
            loss = cross_entropy(local, labels, f"b v{place}, b -> {right}", reduction=op)
            loss.sum().backward()
            assert loss.isnan().tolist() == (OUTSIDE if right else True)
            whole_rows(local.grad, OUTSIDE)
        if right == "" and "dp" not in place:
            x = axes.shard(whole[:4], f"b@dp v{place}").requires_grad_()
            loss = cross_entropy(x, axes.shard(labels[:4], "b@dp"), f"b@dp v{place}, b@dp -> | sum@dp")
            axes.unshard(loss).backward()
            whole_rows(axes.unshard(x.grad), OUTSIDE[:4])
        # -100 is 156 in eight bits
        assert cross_entropy(torch.zeros(1, 200), torch.tensor([156], dtype=torch.uint8), "b v, b -> b").item() > 5


def whole_rows(gradient: torch.Tensor, wanted: list[bool]) -> None:
    assert gradient.isnan().all(1).tolist() == (wanted if gradient.numel() else [True] * len(wanted))
    assert gradient.isnan().any(1).tolist() == (wanted if gradient.numel() else [False] * len(wanted))


@pytest.mark.parametrize("place", ["", "@tp", "@(cp tp)", "@(dp cp tp)"])
def test_a_label_outside_is_nan_in_the_loss_and_in_all_of_its_rows_gradient(pool, place):
    pool.run(outside_labels, place)


def outside_ids(place: str) -> None:
    with mesh():
        whole, ids = numbers(6, 2), torch.tensor([*LABELS[:3], 3, 7])
        results = ["b d", *([f"b{place} d", "b d | *"] if place == "@tp" else [])]
        for right in results:
            t = axes.shard(whole, f"v{place} d").requires_grad_()
            some = ids[:4] if right == f"b{place} d" else ids
            found = axes.unshard(embedding(axes.shard(some, "b"), t, f"b, v{place} d -> {right}"))
            assert found.isnan().all(1).tolist() == [False, True, True, False, True][: len(some)]
            found.sum().backward()
            whole_rows(axes.unshard(t.grad), [True, False, False, False, False, True])
        local = shard(whole, f"v{place} d")
        found = embedding(ids, local, f"b, v{place} d -> b d")
        assert found.isnan().any(1).tolist() == [False, True, True, False, True]
        found.sum().backward()
        wanted = shard(axes.unshard(t.grad), f"v{place} d")
        assert local.grad.isnan().tolist() == wanted.isnan().tolist()


@pytest.mark.parametrize("place", ["", "@tp", "@(cp tp)", "@(dp cp tp)"])
def test_an_index_outside_is_nan_in_the_row_and_in_the_gradient_of_the_nearest_row(pool, place):
    pool.run(outside_ids, place)


# plain shards of which the whole size isn't given


def unknown_sizes() -> None:
    with mesh():
        for size in (1, 2, 3, 5, 6, 8, 9):
            for place in ("dp", "(dp cp)", "(cp tp)", "(dp cp tp)"):
                plain_of_size(size, place)


def plain_of_size(size: int, place: str) -> None:
    whole, w, labels = numbers(3, size) + 2, numbers(size, seed=1), integers(size, 3, seed=2)
    ranks = 2 ** len(place.strip("()").split())
    rows, vector = f"b v@{place}", shard(w, f"v@{place}").detach()
    head = f"{rows}, b -> b | same@{place}"
    for ours, theirs, split, extra in [
        (lambda x, **n: rms_norm(x, rows, "v", vector, **n), lambda x: F.rms_norm(x, (size,), w), True, 1),
        (lambda x, **n: layer_norm(x, rows, "v", vector, **n), lambda x: F.layer_norm(x, (size,), w), True, 1),
        (
            lambda x, **n: cross_entropy(x, labels, head, **n),
            lambda x: F.cross_entropy(x, labels, reduction="none"),
            False,
            1,
        ),
        (
            lambda x, **n: embedding(labels, x.mT, f"k, v@{place} b -> k b", **n),
            lambda x: F.embedding(labels, x.mT),
            False,
            ranks,
        ),
    ]:
        leaf = whole.clone().requires_grad_()
        wanted = theirs(leaf)
        weight = numbers(*wanted.shape, seed=3)
        (gradient,) = torch.autograd.grad((wanted * weight).sum(), leaf)
        sent = []
        for sizes in ({}, {"v": size}):
            x = shard(whole, rows)
            with CommDebugMode() as counted:
                y = ours(x, **sizes)
            sent.append(counted.get_total_counts())
            close(y, shard(wanted, rows) if split else wanted, 1e-9)
            (g,) = torch.autograd.grad((y * (shard(weight, rows).detach() if split else weight)).sum(), x)
            close(g / extra, shard(gradient, rows), 1e-9)
        assert sent[0] == sent[1] + 1


def test_uneven_plain_shards_are_exact_without_their_whole_size_for_one_small_collective_more(pool):
    pool.run(unknown_sizes, timeout=180)


def test_backward_of_a_loss_that_is_same_sends_nothing():
    with axes.simulate(8), axes.init_mesh("dp=2 cp=2 tp=2", device_type="cpu"):
        logits, labels = torch.zeros(2, 3, 4, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
        for result, backward in (("| same@(dp cp tp)", 0), ("| same@(dp cp)", 1), ("", 2)):
            with CommDebugMode() as forth:
                loss = cross_entropy(logits, labels, f"b@dp s@cp v@tp, b@dp s@cp -> {result}", v=8)
            with CommDebugMode() as back:
                loss.backward()
            assert (forth.get_total_counts(), back.get_total_counts()) == (3, backward), result
