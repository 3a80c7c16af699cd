"""Blocks: dims that hold several tensors, taken apart and put together, against slices of the whole."""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import axes
from axes.algebra.errors import AxesError, ExpressionError, ShardingError, SizeError
from axes.algebra.flow.blocks import read_blocks, sizes_of_blocks

AXES = ("a", "b", "c")


@functools.cache
def cube() -> axes.Mesh:
    return axes.init_mesh("a=2 b=2 c=2", device_type="cpu")


# --- a random expression, and what it is on the whole -----------------------------------------------


class Case:
    """A fused tensor `x (g blocks z) y`, its sizes, where it is split, and its blocks."""

    def __init__(self, draw: random.Random, alike: bool):
        free = list(AXES)
        draw.shuffle(free)

        def place() -> tuple[str, ...]:
            return tuple(free.pop() for _ in range(min(len(free), draw.choice([0, 0, 1, 1, 2]))))

        self.sizes: dict[str, int] = {}
        self.places: dict[str, tuple[str, ...]] = {}
        count = draw.randint(2, 4)
        inside = place()
        first = self._block(draw, 0, inside)
        self.blocks = [first]
        for number in range(1, count):
            if alike and inside:
                names = [f"{name[0]}{number}" for name in first]
                self.sizes.update({new: self.sizes[old] for new, old in zip(names, first, strict=True)})
                self.places.update({new: self.places[old] for new, old in zip(names, first, strict=True)})
                self.blocks.append(names)
            else:
                self.blocks.append(self._block(draw, number, inside if draw.random() < 0.7 else ()))
        self.before, self.behind = [], []
        for group, name in ((self.before, "g"), (self.behind, "z")):
            if draw.random() < 0.4:
                group.append(name)
                self._name(draw, name, place())
        self.lead, self.trail = [], []
        for group, name in ((self.lead, "x"), (self.trail, "y")):
            if draw.random() < 0.7:
                group.append(name)
                self._name(draw, name, place())

    def _name(self, draw: random.Random, name: str, place: tuple[str, ...]) -> None:
        self.sizes[name] = 2 ** len(place) * draw.choice([1, 2, 3])
        self.places[name] = place

    def _block(self, draw: random.Random, number: int, place: tuple[str, ...]) -> list[str]:
        names = [f"p{number}", f"q{number}"][: draw.choice([1, 1, 2])]
        split = draw.randrange(len(names))
        for at, name in enumerate(names):
            self._name(draw, name, place if at == split else ())
        return names

    def text(self, name: str, placed: bool) -> str:
        place = self.places[name] if placed else ()
        return name if not place else f"{name}@{place[0]}" if len(place) == 1 else f"{name}@({' '.join(place)})"

    def fused(self, placed: bool) -> str:
        def of(names: list[str]) -> str:
            return " ".join(self.text(name, placed) for name in names)

        blocks = f"({' + '.join(map(of, self.blocks))})"
        if self.before or self.behind:
            blocks = f"({' '.join(filter(None, (of(self.before), blocks, of(self.behind))))})"
        return " ".join(filter(None, (of(self.lead), blocks, of(self.trail))))

    def spec(self) -> str:
        """How the fused tensor lies, without a `+`: blocks that are split are alike, others are one name."""
        blocks = f"blocks={sum(self.counts)}"
        if any(self.places[name] for name in self.blocks[0]):
            blocks = " ".join([str(len(self.blocks)), *(self.text(name, placed=True) for name in self.blocks[0])])
        dim = [self.text(name, placed=True) for name in self.before], [self.text(n, placed=True) for n in self.behind]
        names = [self.text(name, placed=True) for name in (*self.lead, *self.trail)]
        names.insert(len(self.lead), f"({' '.join([*dim[0], blocks, *dim[1]])})")
        return " ".join(names)

    def part(self, number: int, placed: bool) -> str:
        names = [*self.lead, *self.before, *self.blocks[number], *self.behind, *self.trail]
        return " ".join(self.text(name, placed) for name in names)

    def shape(self, names: list[str]) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in names)

    @property
    def counts(self) -> list[int]:
        return [math.prod(self.shape(block)) for block in self.blocks]

    def open(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The blocks of a whole tensor, one dim per name."""
        beside = [self.shape(group) for group in (self.lead, self.before, self.behind, self.trail)]
        parts = whole.reshape(*beside[0], *beside[1], sum(self.counts), *beside[2], *beside[3])
        dim = len(self.lead) + len(self.before)
        return [
            part.reshape(*beside[0], *beside[1], *self.shape(block), *beside[2], *beside[3])
            for part, block in zip(parts.split(self.counts, dim), self.blocks, strict=True)
        ]

    def whole(self) -> torch.Tensor:
        beside = [math.prod(self.shape(group)) for group in (self.before, self.behind)]
        shape = (*self.shape(self.lead), beside[0] * sum(self.counts) * beside[1], *self.shape(self.trail))
        return torch.arange(float(math.prod(shape)), dtype=torch.float64).view(shape)

    @property
    def given(self) -> dict[str, int]:
        beside = [*self.before, *self.behind, *[name for block in self.blocks for name in block]]
        return {name: self.sizes[name] for name in beside}


def coefficients(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.linspace(1, 2 + number, p.numel(), dtype=p.dtype).view(p.shape) for number, p in enumerate(parts)]


# --- DTensors ---------------------------------------------------------------------------------------


def failures(check: Callable[[random.Random, axes.Mesh], Iterator[str]], first: int, count: int) -> list[str]:
    """What a check says of random cases, with the seed of each."""
    mesh, wrong = cube(), []
    for seed in range(first, first + count):
        try:
            wrong += [f"{seed}: {each}" for each in check(random.Random(seed), mesh)]
        except AxesError as error:
            wrong.append(f"{seed}: {error}")
    return wrong


def global_case(draw: random.Random, mesh: axes.Mesh) -> Iterator[str]:
    case = Case(draw, alike=True)
    fused, parts = case.fused(placed=True), [case.part(n, placed=True) for n in range(len(case.blocks))]
    apart, together = f"{fused} -> {', '.join(parts)}", f"{', '.join(parts)} -> {fused}"
    whole = case.whole()
    opened = case.open(whole)
    pieces = [axes.shard(x, s, mesh=mesh).requires_grad_() for x, s in zip(opened, parts, strict=True)]
    sizes = {name: size for name, size in case.given.items() if name in re.findall(r"\w+", case.spec())}
    try:
        placed = axes.shard(whole, case.spec(), mesh=mesh, sizes=sizes)
    except ShardingError:
        placed = None  # DTensor can't say it, so that no expression may make it
    try:
        made = axes.rearrange(pieces, together, sizes=case.given)
    except ShardingError as error:
        if placed is not None or "DTensor can't" not in str(error):
            yield f"{together}: {error}"
        return
    if placed is None or not axes.sharding_of(made).is_equivalent(axes.sharding_of(placed), whole.shape):
        yield f"{together}: {axes.spec_of(made)}"
        return
    got = axes.unshard(made)
    if not torch.equal(got, whole):
        yield together
    factor = coefficients([whole])[0]
    (got * factor).sum().backward()
    for piece, expected in zip(pieces, case.open(factor), strict=True):
        if axes.spec_of(piece.grad) != axes.spec_of(piece) or not torch.equal(axes.unshard(piece.grad), expected):
            yield f"gradient of {together}"
    kept = [piece.grad.to_local().clone() for piece in pieces]
    pieces[0].grad.to_local().mul_(2)
    if any(not torch.equal(p.grad.to_local(), k) for p, k in zip(pieces[1:], kept[1:], strict=True)):
        yield f"gradients share memory in {together}"
    x = axes.shard(whole.clone(), axes.spec_of(made), mesh=mesh).requires_grad_()
    found = axes.rearrange(x, apart, sizes=case.given)
    loss = 0.0
    for piece, expected, factor in zip(found, opened, coefficients(opened), strict=True):
        if not torch.equal(axes.unshard(piece), expected):
            yield apart
        if draw.random() < 0.8:
            moved = axes.reshard(piece, " ".join(["_"] * piece.ndim)) if draw.random() < 0.5 else piece
            loss = loss + (axes.unshard(moved) * factor).sum()
        else:
            factor.zero_()
            loss = loss + 0 * axes.unshard(piece).sum() if draw.random() < 0.5 else loss
        expected.copy_(factor)
    if isinstance(loss, torch.Tensor):
        loss.backward()
        if not torch.equal(axes.unshard(x.grad), whole):  # the views of `whole` hold the factors now
            yield f"gradient of {apart}"
    with torch.no_grad():
        before = axes.to_local(x).clone()
        for piece in found:
            axes.to_local(piece).mul_(3)
        if not torch.equal(axes.to_local(x), before):
            yield f"a result of {apart} shares memory"


@pytest.mark.parametrize("first", range(0, 240, 80))
def test_blocks_of_dtensors_are_those_of_the_whole(pool, first):
    assert pool.run(failures, global_case, first, 80, timeout=300) == [[]] * 8


# --- plain shards -----------------------------------------------------------------------------------


def local_case(draw: random.Random, mesh: axes.Mesh) -> Iterator[str]:
    case = Case(draw, alike=False)
    fused, parts = case.fused(placed=True), [case.part(n, placed=True) for n in range(len(case.blocks))]
    whole = case.whole()
    mine = [
        axes.to_local(axes.shard(x, spec, mesh=mesh)).clone() for x, spec in zip(case.open(whole), parts, strict=True)
    ]
    pieces = [x.clone().requires_grad_() for x in mine]
    made = axes.rearrange(pieces, f"{', '.join(parts)} -> {fused}", mesh, sizes=case.given)
    beside = [len(case.lead), len(case.lead) + len(case.before)]
    shape, at = list(mine[0].shape), beside[1]
    inner = [math.prod(x.shape[at : at + len(b)]) for x, b in zip(mine, case.blocks, strict=True)]
    flat = [
        x.reshape(*shape[:at], n, *x.shape[at + len(b) :]) for x, n, b in zip(mine, inner, case.blocks, strict=True)
    ]
    expected = torch.cat(flat, at)
    tail = expected.shape[at + 1 + len(case.behind) :]
    expected = expected.reshape(*shape[: beside[0]], -1, *tail)
    if not torch.equal(made, expected):
        yield fused
    (made * torch.arange(made.numel()).view(made.shape)).sum().backward()
    x = made.detach().requires_grad_()
    found = axes.rearrange(x, f"{fused} -> {', '.join(parts)}", mesh, sizes=case.given)
    if not all(map(torch.equal, found, mine)):
        yield f"{fused} ->"
    sum((y * p.grad).sum() for y, p in zip(found, pieces, strict=True)).backward()
    if not torch.equal(x.grad, torch.arange(made.numel()).view(made.shape).to(x.dtype)):
        yield f"gradient of {fused}"


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_blocks_of_plain_shards_are_this_ranks_part_of_each(pool, first):
    assert pool.run(failures, local_case, first, 100) == [[]] * 8


# --- one at a time ----------------------------------------------------------------------------------


def grouped_queries() -> list[bool]:
    """The projection of four queries and two key heads, nested: per key head its queries, key and value."""
    mesh = axes.init_mesh("dp=4 tp=2", device_type="cpu")
    whole = torch.randn(2 * 4 * 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = axes.shard(whole, "(g@tp r) d", g=2, mesh=mesh).requires_grad_()
    q, k, v = axes.rearrange(w, "(g@tp (r q + q + q)) d -> (g r)@tp q d, g@tp q d, g@tp q d", g=2, r=2)
    parts = whole.view(2, 12, 5).split((6, 3, 3), 1)
    axes.reduce(q, "h@tp q d ->", "sum").backward()
    gradient = torch.cat([torch.ones(2, 6, 5), torch.zeros(2, 6, 5)], 1).reshape(24, 5)
    return [
        axes.spec_of(q) == "_@tp _ _",
        torch.equal(axes.unshard(q), parts[0].reshape(4, 3, 5)),
        torch.equal(axes.unshard(k), parts[1]),
        torch.equal(axes.unshard(v), parts[2]),
        torch.equal(axes.unshard(w.grad), gradient.to(whole.dtype)),
    ]


def test_the_blocks_of_each_key_head(pool):
    assert pool.run(grouped_queries) == [[True] * 5] * 8


def gate_and_up() -> list[bool]:
    mesh = axes.init_mesh("dp=4 tp=2", device_type="cpu")
    generator = torch.Generator().manual_seed(0)
    whole, x = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((12, 4), (8, 4)))
    w = axes.shard(whole, "(f@tp + f@tp) d", mesh=mesh).requires_grad_()
    inputs = axes.shard(x, "b@dp d", mesh=mesh)
    both = axes.einsum(inputs, w, "b d, f d -> b f")  # one product for both
    gate, up = axes.rearrange(both, "b (f@tp + f@tp) -> b f@tp, b f@tp")
    y = axes.einsum(gate, up, "b f, b f -> b f")
    (axes.unshard(y)).square().sum().backward()
    alone = whole.clone().requires_grad_()
    one, two = (x @ alone.T).chunk(2, 1)
    (one * two).square().sum().backward()
    return [
        axes.sharding_of(w).is_equivalent(mesh.sharding("(2 f@tp) d"), (12, 4)),
        torch.allclose(axes.unshard(y), one * two, rtol=1e-12),
        torch.allclose(axes.unshard(w.grad), alone.grad, rtol=1e-12),
        axes.spec_of(w.grad) == axes.spec_of(w),
    ]


def test_gate_and_up_are_one_product(pool):
    assert pool.run(gate_and_up) == [[True] * 4] * 8


def second_derivatives() -> list[bool]:
    mesh = axes.init_mesh("dp=4 tp=2", device_type="cpu")
    whole = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for x in (axes.shard(whole, "(f@tp + f@tp + f@tp) d", mesh=mesh).requires_grad_(), whole.clone().requires_grad_()):
        a, b, c = axes.rearrange(x, "(f + f + f) d -> f d, f d, f d")
        y = axes.rearrange((a, c, b), "f d, f d, f d -> (f + f + f) d")
        dots = [axes.einsum(y, y, y, "n d, n d, n d -> n d"), axes.einsum(a, b, "f d, f d -> f d")]
        total = sum((axes.unshard(z) if x is not whole and hasattr(z, "placements") else z).sum() for z in dots)
        (g,) = torch.autograd.grad(total, x, create_graph=True)
        g = axes.unshard(g) if hasattr(g, "placements") else g
        (h,) = torch.autograd.grad(g.square().sum(), x)
        found.append(axes.unshard(h) if hasattr(h, "placements") else h)
    return [torch.allclose(*found, rtol=1e-12)]


def test_second_derivatives_of_blocks(pool):
    assert pool.run(second_derivatives) == [[True]] * 8


def refusals() -> list[str]:
    mesh = axes.init_mesh("dp=4 tp=2", device_type="cpu")
    x = axes.shard(torch.zeros(16, 4), "n@tp d", mesh=mesh)
    q, k = axes.shard(torch.zeros(8, 4), "n@tp d", mesh=mesh), axes.shard(torch.zeros(4, 4), "n@tp d", mesh=mesh)
    whole = axes.shard(torch.zeros(8, 4), "n d", mesh=mesh)
    calls = [
        lambda: axes.rearrange(x, "(f + f) d -> f d, f d"),
        lambda: axes.rearrange((q, k), "q d, k d -> (q + k) d"),
        lambda: axes.rearrange((q, whole), "q d, k d -> (q + k) d"),
        lambda: axes.rearrange((q, axes.to_local(whole)), "q d, k d -> (q + k) d"),
        lambda: axes.rearrange((q, whole.to(torch.float64)), "q d, k d -> (q + k) d"),
        lambda: axes.rearrange(x, "(a + b) d -> a d, b d"),
        lambda: axes.rearrange(whole, "(a@tp + a@tp) d -> a@tp d, a@tp d"),
        lambda: axes.rearrange(torch.zeros(5, 4), "(a@tp + b@tp) d -> a@tp d, b@tp d", mesh, a=3),
        lambda: axes.einsum(x, x, "(f + f) d, n d -> f n"),
        lambda: axes.shard(torch.zeros(16, 4), "(h@tp + g@tp) d", mesh=mesh),
        lambda: axes.rearrange((q,), "q d, k d -> (q + k) d"),
        lambda: axes.rearrange(3.0, "(a + b) -> a, b", a=1),
    ]
    found = []
    for call in calls:
        try:
            found.append(f"no error: {call()}")
        except AxesError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


SAYS = [
    "ShardingError: a rank doesn't have its part of every block: _@tp of 16 is 2 blocks of 8, 8",
    "ShardingError: blocks of a DTensor lie alike, and where they are split they have one size",
    "ShardingError: blocks of a DTensor lie alike",
    "ShardingError: axes.rearrange takes DTensors or plain tensors, not both",
    "ShardingError: tensors that are put together have one dtype; found float32, float64",
    "SizeError: the sizes of 'a' and 'b' don't follow from  (a + b) = 16",
    "ShardingError: the tensor isn't sharded as the left side says",
    "SizeError: 3 doesn't divide into 2 parts: 'a' is split inside of blocks",
    "ExpressionError: einsum takes no blocks",
    "ExpressionError: the blocks of (h@tp + g@tp) aren't written alike",
    "ExpressionError: the left side is 2 tensors; found 1",
    "ShardingError: axes.rearrange takes tensors; found float",
]


def test_what_can_not_be_taken_apart_is_said(pool):
    for found in pool.run(refusals):
        assert [text[: len(says)] for text, says in zip(found, SAYS, strict=True)] == SAYS


def corners() -> list[str]:
    """What an attack found: each against slices of the whole, in both views."""
    mesh = axes.init_mesh("one=1 dp=4 tp=2", device_type="cpu")
    wrong = []

    def same(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        whole = axes.unshard(found) if isinstance(found, DTensor) else found
        if not torch.equal(whole, expected):
            wrong.append(what)

    a, b = torch.arange(24.0).view(2, 3, 4), -torch.arange(18.0).view(2, 3, 3)
    behind = torch.cat((a, b), 2)
    for one, two in ((a, b), (axes.shard(a, "x y z", mesh=mesh), axes.shard(b, "x y z", mesh=mesh))):
        same("dots in the group", axes.rearrange((one, two), "... q, ... k -> (... (q + k))"), behind.reshape(-1))
        same("names in the group", axes.rearrange((one, two), "x y q, x y k -> (x y (q + k))"), behind.reshape(-1))
        joined = axes.rearrange((one, two), "x y q, x y k -> (x y) (q + k)")
        same("another group", joined, behind.reshape(6, 7))
        q, empty = axes.rearrange(one, "x y (q + k) -> x y q, x y k", q=4)
        same("an empty block", empty, a[:, :, :0])
        same("what an empty block is beside", q, a)
    both = axes.shard(torch.arange(16.0).view(8, 2), "(f@(one tp) + f@(one tp)) d", mesh=mesh).requires_grad_()
    one, two = axes.rearrange(both, "(f@(one tp) + f@(one tp)) d -> f@(one tp) d, f@(one tp) d")
    back = axes.rearrange((two, one), "f@(tp one) d, f@(tp one) d -> (f@(tp one) + f@(tp one)) d")
    same("axes of size one", back, torch.arange(16.0).view(2, 4, 2).flip(0).reshape(8, 2))
    (axes.unshard(back) * torch.arange(16.0).view(8, 2)).sum().backward()
    same("a gradient with axes of size one", both.grad, torch.arange(16.0).view(2, 4, 2).flip(0).reshape(8, 2))
    shard = torch.arange(6.0).view(6, 1)
    h, whole = axes.rearrange(shard, "(h@tp + h) d -> h@tp d, h d", mesh, h=4)
    same("one name, split in one block", h, shard[:2])
    same("one name, whole in the other block", whole, shard[2:])
    part = torch.arange(3.0) if mesh.axis("tp").index == 0 else torch.arange(3.0, 5.0)
    q, k = axes.rearrange(part, "(q + k)@tp -> q, k", mesh, q=3, k=2)
    same("an uneven dim", torch.cat((q, k)), torch.arange(5.0))
    return wrong


def test_corners_of_blocks(pool):
    assert pool.run(corners) == [[]] * 8


def unsent() -> list[tuple[str, int]]:
    """What is refused, and how much was sent before."""
    mesh = axes.init_mesh("dp=4 tp=2", device_type="cpu")
    split, whole = axes.shard(torch.zeros(4, 2), "f@tp d", mesh=mesh), axes.shard(torch.zeros(4, 2), "f d", mesh=mesh)
    wide, shards = axes.shard(torch.zeros(4, 3), "f@tp d", mesh=mesh), torch.zeros(2, 2)
    both = axes.shard(torch.zeros(8), "(f@tp + f@tp)", mesh=mesh)
    calls = [
        lambda: axes.rearrange((split, whole), "f@tp d, f@tp d -> (f + f) d"),
        lambda: axes.rearrange((split, wide), "f@tp d, g@tp d -> (f + g) d"),
        lambda: axes.rearrange((split, whole), "f@tp d, g d -> (f + g@tp) d", g=4),
        lambda: axes.rearrange((shards, torch.zeros(2, 3)), "f@tp d, g@tp e -> (f + g) d", mesh),
        lambda: axes.rearrange(both, "(f@tp + f) -> f@tp, f"),
        lambda: axes.rearrange(torch.zeros(3), "(q + k)@tp -> q, k", mesh, q=3),
        lambda: axes.rearrange(shards, "(q + k) d -> q@tp d, k d", mesh="tp", q=1),
    ]
    found = []
    for call in calls:
        with CommDebugMode() as sent, pytest.raises(AxesError) as error:
            call()
        found.append((type(error.value).__name__, sent.get_total_counts()))
    return found


def test_what_is_refused_is_refused_before_anything_is_sent(pool):
    kinds = [
        "ShardingError",
        "SizeError",
        "ShardingError",
        "ExpressionError",
        "ShardingError",
        "SizeError",
        "MeshError",
    ]
    assert pool.run(unsent) == [[(kind, 0) for kind in kinds]] * 8


def compiled() -> list[bool]:
    mesh = axes.init_mesh("dp=2 tp=2", device_type="cpu")
    whole = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = axes.shard(whole, "(f@tp + f@tp) d", mesh=mesh)

    def swap(x: torch.Tensor) -> torch.Tensor:
        one, two = axes.rearrange(x, "(f@tp + f@tp) d -> f@tp d, f@tp d")
        return axes.rearrange((two, one), "f@tp d, f@tp d -> (f@tp + f@tp) d")

    expected = torch.cat((whole[6:], whole[:6]))
    found = []
    for x in (w, axes.to_local(w).clone()):
        leaf = x.requires_grad_()
        with axes.use_mesh(mesh):
            y = torch.compile(swap, backend="aot_eager", fullgraph=True)(leaf)
        y = y if x is w else axes.from_local(y, "(f@tp + f@tp) d", mesh, grad="whole")
        found.append(torch.equal(axes.unshard(y), expected))
        (axes.unshard(y) * whole).sum().backward()
        gradient = leaf.grad if x is w else axes.from_local(leaf.grad, "(f@tp + f@tp) d", mesh)
        found.append(torch.equal(axes.unshard(gradient), expected))
    return found


def test_blocks_compile(warm):
    assert warm(compiled, 4, timeout=120) == [[True] * 4] * 4


def test_sizes_follow_where_one_is_open():
    (qkv,) = read_blocks("(h k + g k + g k) d -> h k d, g k d, g k d").left
    assert sizes_of_blocks(qkv, "", (32, 5), {"h": 8, "k": 2}, {})[0]["g"] == 4
    with pytest.raises(SizeError, match="can't be 33"):
        sizes_of_blocks(qkv, "", (33, 5), {"h": 8, "k": 2}, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(a + b) d -> a d", "the left side is 2 tensors, blocks counted, and the right side 1"),
        ("(a a + b) d -> a d, b d", "'a' stands twice in one block"),
        ("(a=2 + a=3) d -> a d, a d", "'a' is given two sizes: 2 and 3"),
        ("(_ + b) d -> a d, b d", "found '_'"),
        ("(a + b) d", "rearrange needs '->'"),
        ("(a + b)@tp (c + d) -> a, b", "one dim of a tensor holds blocks"),
        ("(a@tp + b)@tp -> a, b", "a group has '@' inside or outside, not both"),
    ],
)
def test_texts_that_are_no_blocks(text, says):
    with pytest.raises(AxesError, match=re.escape(says)):
        axes.rearrange(torch.zeros(4, 4), text)


def test_functions_that_take_no_blocks_say_so():
    for call in (
        lambda: axes.reduce(torch.zeros(4, 4), "(a + b) d -> d", "sum"),
        lambda: axes.einsum(torch.zeros(4, 4), torch.zeros(4, 4), "(a + b) d, d e -> e"),
        lambda: axes.repeat(torch.zeros(4, 4), "(a + b) d -> a d n", n=2),
    ):
        with pytest.raises(ExpressionError, match="takes no blocks"):
            call()
