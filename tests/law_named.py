"""The law of collectives by name: each is a function of the tensors of all ranks of an axis, in a region and outside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from tests.strategies import place
from tests.whole_cases import DTYPES, LAYOUTS, Draw, Grid, laid, whole

REDUCTIONS = ("psum", "pmean", "pmax", "pmin")
FLOATS = (torch.float64,) * 4 + (torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
EXACT = (torch.float8_e5m2, torch.uint16, torch.uint64, torch.complex32)
"""What is only moved."""


def line(grid: Grid, names: Sequence[str]) -> list[int]:
    """The positions of the ranks that this one meets along a product of names, in the order of their coordinates."""
    joint = grid.joint(names).tolist()
    offsets = [at - joint.index(coordinate) for at, coordinate in enumerate(joint)]
    mine = [at for at, offset in enumerate(offsets) if offset == offsets[grid.here or 0]]
    return sorted(mine, key=lambda at: joint[at])


def numbers(shape: Sequence[int], seed: int, dtype: torch.dtype, layout: str = "dense") -> torch.Tensor:
    """Small numbers with ties, in any dtype."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    x = whole(shape, seed, dtype if dtype in DTYPES else torch.float64)
    x = x.abs().to(torch.int32) if dtype in (torch.uint16, torch.uint64) else x
    return laid(x.to(torch.complex64 if dtype is torch.complex32 else dtype).to(dtype), layout)


def reduced(name: str, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """In a dtype in which nothing is lost."""
    dtype = xs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    every = torch.stack([x.to(wide) for x in xs])
    if name == "psum":
        return every.sum(0).to(torch.int64 if dtype is torch.bool else dtype)
    return {"pmean": every.mean, "pmax": every.amax, "pmin": every.amin}[name](0).to(dtype)


def moved(xs: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    found = [torch.zeros_like(x) for x in xs]
    for source, target in pairs:
        found[target] = xs[source]
    return found


def cut(xs: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]], dim: int, other: int) -> list[torch.Tensor]:
    """Pieces of these sizes along a dim, transposed among ranks and put together along another."""
    pieces = [x.split(list(row), dim) for x, row in zip(xs, sizes, strict=True)]
    return [torch.cat([row[at] for row in pieces], other) for at in range(len(xs))]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The numbers of any dtype, to compare."""
    wide = torch.complex128 if x.dtype.is_complex else torch.float64 if x.dtype.is_floating_point else torch.int64
    return x.detach().to(torch.complex64).to(wide) if x.dtype is torch.complex32 else x.detach().to(wide)


def like(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), f"{found} for {expected}"
    tolerance = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05, torch.float64: 1e-12}
    most = tolerance.get(found.dtype, 0.0)
    assert torch.allclose(bits(found), bits(expected), rtol=most, atol=most), (
        f"{found.tolist()} for {expected.tolist()}"
    )


def slopes(
    function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    xs: list[torch.Tensor],
    ws: list[torch.Tensor],
    order: int,
) -> list[torch.Tensor]:
    """For each rank the derivatives of all ranks' losses, up to the second."""
    xs = [x.detach().clone().requires_grad_() for x in xs]
    ys = function(xs)
    loss = sum(((y * y if order > 1 else y) * w).double().sum() for y, w in zip(ys, ws, strict=True))
    for _ in range(order):
        loss = loss + 0 * sum(x.double().sum() for x in xs)
        found = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
        loss = sum((g * g).sum() for g in found)
    return list(found)


def slope(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, order: int) -> torch.Tensor:
    loss = ((y * y if order > 1 else y) * w).sum()
    for _ in range(order):
        if not loss.requires_grad:
            return torch.zeros_like(x)
        (found,) = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
        loss = (found * found).sum()
    return found


def named(d: Draw) -> None:
    """Each rank gets what a function of the list of all ranks' tensors says, and so do gradients."""
    p, random = d.program, d.random
    grid, g = d.grid(elsewhere=0.08)
    names = tuple(d.family(grid)[: random.choice((1, 1, 2, 3))]) if d.chance(0.95) else ()
    count, m = 1, f"m{g[1:]}"
    for name in names:
        count *= grid.sizes[name]
    axis = repr(names[0]) if len(names) == 1 and d.chance(0.7) else repr(names)
    kind = random.choice(
        (*REDUCTIONS, "all_gather", "psum_scatter", "all_to_all", "all_to_all", "sizes", "ppermute", "ppermute")
    )
    d.features.add(f"named {kind}")
    shape = list(d.shape(random.choice((0, 1, 2, 2, 3)), most=200, extents=(0, 1, 1, 2, 3)))
    if not shape and kind in ("all_gather", "psum_scatter", "all_to_all", "sizes"):
        shape = [random.choice((1, 2, 3))]
    dim, other = (random.randrange(-len(shape), len(shape)) if shape else 0 for _ in "12")
    if kind in ("psum_scatter", "all_to_all"):
        shape[dim] *= count
    dtypes = FLOATS if d.chance(0.5) or kind == "pmean" else OTHERS
    if kind in ("all_gather", "all_to_all", "sizes", "ppermute") and d.chance(0.1):
        dtypes = EXACT
    dtype = random.choice(dtypes)
    if kind in ("pmax", "pmin") and dtype.is_complex:
        return
    p.do("from tests.law_named import *")
    p.do(f"at, here = line({g}, {names}), {g}.here")
    layout = random.choice([each for each in LAYOUTS if each != "expanded"])
    seed, sizes = d.seed(), [[random.choice((0, 0, 1, 2, 3)) for _ in range(count)] for _ in range(count)]
    call, expected = f"axes.{kind}(t, {axis}", f"[reduced({kind!r}, xs)] * {count}"
    if kind == "all_gather":
        call, expected = f"{call}, dim={dim}", f"[torch.cat(xs, {dim})] * {count}"
    elif kind == "psum_scatter":
        call, expected = f"{call}, dim={dim}", f"list(reduced('psum', xs).tensor_split({count}, {dim}))"
    elif kind == "all_to_all":
        each = [[shape[dim] // count] * count] * count
        call, expected = f"{call}, {dim}, {other}", f"cut(xs, {each}, {dim}, {other})"
    elif kind == "sizes":
        call = f"axes.all_to_all(t, {axis}, {dim}, {dim}, send_sizes={sizes}[mine], recv_sizes=[row[mine] for row in {sizes}]"
        expected = f"cut(xs, {sizes}, {dim}, {dim})"
    elif kind == "ppermute":
        shift = random.randrange(-9, 10)
        pairs = list(zip(random.sample(range(count), count), random.sample(range(count), count), strict=True))
        pairs = pairs[: random.randrange(count + 1)]
        call, pairs = (
            (f"{call}, shift={shift}", [(at, (at + shift) % count) for at in range(count)])
            if d.chance(0.5)
            else (f"{call}, perm={pairs}", pairs)
        )
        expected = f"moved(xs, {pairs})"
    if grid.here is None:
        p.do(f"assert {g}.here is None")
        p.do(f"t = torch.ones({shape}); mine = 0")
        if count > 1:
            p.refuse(f"{call}, mesh={m})", "isn't one of the ranks of")
        return
    p.do("mine = at.index(here)")
    p.do(f"assert (axes.axis_index({axis}, mesh={m}), axes.axis_size({axis}, mesh={m})) == (mine, {count})")
    shapes = f"[{shape}] * {count}"
    if kind == "sizes":
        shapes = f"[{shape[:dim]} + [sum(row)] + {shape[dim:][1:]} for row in {sizes}]"
    p.do(f"xs = [numbers(shape, {seed} + position, {dtype}, {layout!r}) for shape, position in zip({shapes}, at)]")
    p.do("x = xs[mine].detach(); keep = x.clone()")
    differentiated = dtype in FLOATS
    if differentiated:
        d.features.add("gradient")
        p.do("x.requires_grad_()")
    p.do(f"f = lambda t: {call}, mesh={m})")
    if kind != "sizes" and d.chance(0.4):  # what this rank has is a row of a DTensor, split over the whole mesh
        d.features.add("region")
        r, ranks = f"r{place(grid.axis_names)}", [grid.sizes[name] for name in grid.axis_names]
        left, right = (" ".join([r, *(f"{e}{i}" for i in range(len(shape)))]) for e in "de")
        p.do(f"f = lambda t: {call})")
        p.do(f"X = axes.from_local(x[None], {left!r}, mesh={m}, shape=({'*'.join(map(str, ranks))}, *x.shape))")
        p.do(f"y = axes.to_local(axes.shard_map(lambda t: f(t[0])[None], {f'{left} -> {right}'!r}, mesh={m})(X))[0]")
    else:
        p.do("y = f(x)")
    p.do(f"F = lambda xs: {expected}")
    p.do("like(y, F(xs)[mine])")
    p.do("like(x, keep)")
    if not differentiated:
        return
    order = 2 if dtype is torch.float64 and kind not in ("pmax", "pmin") and d.chance(0.4) else 1
    d.features |= {"second derivative"} if order > 1 else set()
    p.do(f"ws = [numbers(each.shape, {seed} + 1000 + position, {dtype}) for each, position in zip(F(xs), at)]")
    p.do(f"like(slope(y, x, ws[mine], {order}), slopes(F, xs, ws, {order})[mine].to(x.dtype))")
