"""The law of blocks: a dim that holds several tensors, taken apart and put together, is slices of the whole."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import axes
from tests.strategies import place
from tests.whole_cases import Draw, Grid, refusal
from tests.whole_laws import cotangent, make_door, make_whole, mesh_of


@dataclass
class Fused:
    """A fused tensor `x (g blocks z) y`: the names of each part, their sizes, and the axes that split them."""

    sizes: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)
    blocks: list[list[str]] = field(default_factory=list)
    beside: dict[str, list[str]] = field(default_factory=dict)

    def name(self, d: Draw, grid: Grid, name: str, by: list[str]) -> None:
        self.places[name] = by
        self.sizes[name] = math.prod(grid.sizes[axis] for axis in by) * d.random.choice((1, 2, 3))

    def text(self, names: Sequence[str]) -> str:
        return " ".join(name + place(self.places[name]) for name in names)

    @property
    def fused(self) -> str:
        blocks = f"({' + '.join(map(self.text, self.blocks))})"
        if self.beside["g"] or self.beside["z"]:
            blocks = f"({self.text(self.beside['g'])} {blocks} {self.text(self.beside['z'])})"
        return f"{self.text(self.beside['x'])} {blocks} {self.text(self.beside['y'])}".strip()

    @property
    def spec(self) -> str:
        """How it lies, without a `+`: blocks that are split are alike, others are one name."""
        block = f"blocks={sum(self.counts)}"
        if any(self.places[name] for name in self.blocks[0]):
            block = f"{len(self.blocks)} {self.sized(self.blocks[0])}"
        group = " ".join(filter(None, (self.sized(self.beside["g"]), block, self.sized(self.beside["z"]))))
        return f"{self.text(self.beside['x'])} ({group}) {self.text(self.beside['y'])}".strip()

    def sized(self, names: Sequence[str]) -> str:
        return " ".join(f"{name}={self.sizes[name]}{place(self.places[name])}" for name in names)

    def part(self, number: int) -> list[str]:
        return [*self.beside["x"], *self.beside["g"], *self.blocks[number], *self.beside["z"], *self.beside["y"]]

    def shape(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.sizes[name] for name in names)

    @property
    def counts(self) -> list[int]:
        return [math.prod(self.shape(block)) for block in self.blocks]


def fused_of(d: Draw, grid: Grid, alike: bool) -> Fused:
    found, free = Fused(), d.family(grid)

    def some() -> list[str]:
        return [free.pop() for _ in range(min(len(free), d.random.choice((0, 0, 1, 1, 2))))]

    inside = some()
    names = d.random.choice((["p"], ["p", "q"]))
    split = d.random.choice(names)
    for number in range(d.random.randint(2, 4)):
        block = [f"{name}{number}" for name in names]
        for name, own in zip(names, block, strict=True):
            by = inside if name == split and (alike or d.chance(0.7)) else []
            found.name(d, grid, own, by)
            if alike and inside and number:
                found.sizes[own] = found.sizes[f"{name}0"]
        found.blocks.append(block)
    for name in "gzxy":
        found.beside[name] = [name] * d.chance(0.5)
        for each in found.beside[name]:
            found.name(d, grid, each, some())
    return found


def opened(
    whole: torch.Tensor, before: Sequence[int], blocks: Sequence[Sequence[int]], behind: Sequence[int]
) -> list[torch.Tensor]:
    """The blocks of a tensor, one dim for each name."""
    counts = [math.prod(block) for block in blocks]
    rows = whole.reshape(*before, sum(counts), *behind)
    return [part.reshape(*before, *b, *behind) for part, b in zip(rows.split(counts, len(before)), blocks, strict=True)]


def blocks(d: Draw) -> None:
    """Taken apart and put together, in both views, with gradients that share no memory."""
    p = d.program
    grid, g = d.grid(computed=True)
    m, local = mesh_of(g), d.chance(0.4)
    found = fused_of(d, grid, alike=not local)
    parts = [found.part(number) for number in range(len(found.blocks))]
    specs = [found.text(part) for part in parts]
    given = {n: s for n, s in found.sizes.items() if n not in (*found.beside["x"], *found.beside["y"])}
    together, apart = f"{', '.join(specs)} -> {found.fused}", f"{found.fused} -> {', '.join(specs)}"
    ends = f"{found.shape([*found.beside['x'], *found.beside['g']])}, {[found.shape(b) for b in found.blocks]}, {found.shape([*found.beside['z'], *found.beside['y']])}"  # fmt: skip
    middle = math.prod(found.shape([*found.beside["g"], *found.beside["z"]])) * sum(found.counts)
    shape = (*found.shape(found.beside["x"]), middle, *found.shape(found.beside["y"]))
    if math.prod(shape) > 2000:
        return
    d.features |= {"blocks", "gradient"}
    p.do("from tests.law_blocks import opened")
    make_whole(d, "W", shape, torch.float64, g)
    p.do(f"wholes = opened(W, {ends})")
    if local:
        d.features.add("local view")
        mine = [[found.sizes[n] // math.prod(grid.sizes[a] for a in found.places[n]) for n in part] for part in parts]
        at = len(found.beside["x"]) + len(found.beside["g"])
        inner = [shape[at : at + len(block)] for shape, block in zip(mine, found.blocks, strict=True)]
        tail = mine[0][at + len(found.blocks[0]) :]
        p.do(f"pieces = [part(x, {g}, s).requires_grad_() for x, s in zip(wholes, {specs})]")
        p.do(f"y = axes.rearrange(pieces, {together!r}, mesh={m}, sizes={given})")
        p.do(f"[same(a, b) for a, b in zip(opened(y, {mine[0][:at]}, {inner}, {tail}), pieces, strict=True)]")
        p.do("w = torch.arange(y.numel(), dtype=y.dtype).view(y.shape); y.backward(w)")
        p.do("x = y.detach().requires_grad_()")
        p.do(f"found = axes.rearrange(x, {apart!r}, mesh={m}, sizes={given})")
        p.do("[same(a, b) for a, b in zip(found, pieces, strict=True)]")
        p.do("torch.autograd.backward(list(found), [x.grad for x in pieces])")
        p.do("same(x.grad, w)")
        return
    line = f"pieces = [axes.shard(x, s, mesh={m}).requires_grad_() for x, s in zip(wholes, {specs})]"
    reason = "|".join(filter(None, (refusal(grid, s, found.shape(n)) for s, n in zip(specs, parts, strict=True))))
    if reason:
        p.refuse(line, reason)
        return
    p.do(line)
    line = f"axes.rearrange(pieces, {together!r}, sizes={given})"
    try:
        axes.shard(p["W"], found.spec, mesh=grid.mesh)
    except axes.ShardingError:
        p.refuse(line, "DTensor")  # what it can't have, no expression makes
        return
    p.do(f"y = {line}")
    p.do(f"assert axes.sharding_of(y).is_equivalent(axes.sharding_of(axes.shard(W, {found.spec!r}, mesh={m})), {shape}), axes.spec_of(y)")  # fmt: skip
    p.do("same(axes.unshard(y), W)")
    cotangent(d, "c", "W", grid, g, re.sub(r"(?<!@)\([^()]*\)", "w", found.spec))
    p.do("y.backward(c)")
    p.do(f"for x, s, slope in zip(pieces, {specs}, opened(C, {ends})): check(x.grad, slope, {g}, s); owns(x.grad)")
    p.do("kept = [whole_of(x.grad) for x in pieces[1:]]; pieces[0].grad.mul_(2)")
    p.do("[same(whole_of(x.grad), k, 'gradients share memory:') for x, k in zip(pieces[1:], kept)]")
    make_door(d, "x", "W", grid, g, found.spec, 0)
    p.do("x.requires_grad_(); V = W.clone().requires_grad_()")
    p.do(f"found, wanted = axes.rearrange(x, {apart!r}, sizes={given}), opened(V, {ends})")
    p.do("[same(axes.unshard(y), v) for y, v in zip(found, wanted, strict=True)]")
    used = [number for number in range(len(parts)) if d.chance(0.7)] or [0]
    for number in used:
        p.do(f"v = wanted[{number}]; V{number} = v")
        cotangent(d, f"d{number}", f"V{number}", grid, g, specs[number])
    p.do(f"torch.autograd.backward([found[n] for n in {used}], [{', '.join(f'd{n}' for n in used)}], retain_graph=True)")  # fmt: skip
    p.do(f"torch.autograd.backward([wanted[n] for n in {used}], [{', '.join(f'D{n}' for n in used)}])")
    p.do("same(whole_of(x.grad), V.grad, 'the gradient')")
    p.do("keep = whole_of(x); [axes.to_local(y.detach()).mul_(3) for y in found]")
    p.do("same(whole_of(x), keep, 'a result shares memory:')")
