"""A law of transfers: tensors move from any layouts on any ranks to any others, by tables of layout rules, and come back.

What is right is what torch does with the whole tensors. A plan receives what a rank wants and hasn't, and no byte more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.whole_cases import DTYPES, EXTENTS, LAYOUTS, Draw, Forms, Grid, refusal

Shape = tuple[int, ...]
Side = tuple[Grid, str, str, bool]
"""A mesh as the oracle knows it, the names of both in the program, and whether it is a part of another."""

End = tuple[Side, str]
"""Where a tensor lies on one side: the mesh and the spec."""


@dataclass
class Group:
    """Sources that become targets by one rule. targets: the shape of each, and the text of it by torch."""

    sources: dict[str, Shape]
    targets: dict[str, tuple[Shape, str]]
    rule: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    to: torch.dtype = torch.float32


def side(d: Draw, number: int) -> Side:
    """A mesh of a side: of all ranks, of others, or the part of a mesh that some rank is in."""
    grid, g = d.grid(elsewhere=0.4, sub=False)
    own = [name for name, size in grid.declared.items() if size > 1]
    if len(own) < 2 or d.chance(0.7):
        return grid, g, f"m{g[1:]}", False
    d.features.add("part of a mesh")
    names = d.random.sample(own, d.random.randint(1, len(own) - 1))
    position = d.random.randrange(len(grid.ranks))
    rest = [name for name in grid.declared if name not in names]
    line = [at for at in range(len(grid.ranks)) if all(grid.table[n][at] == grid.table[n][position] for n in rest)]
    line.sort(key=lambda at: int(grid.joint(names)[at]))
    part = Grid(" ".join(f"{name}={grid.sizes[name]}" for name in names), order=tuple(grid.ranks[at] for at in line))
    d.program.do(f"p{number} = {part!r}; q{number} = m{g[1:]}.at(base() + {grid.ranks[position]})[{tuple(names)}]")
    return part, f"p{number}", f"q{number}", True


def group(d: Draw, at: int) -> Group:
    """One, two or three tensors, and what they become."""
    random, s, u = d.random, f"s{at}", f"u{at}"
    kind = random.choice(
        ("same", "same", "renamed", "turned", "flat", "stack", "unstack", "cat", "split", "tied", "idle")
    )
    d.features.add(f"{kind} tensors")
    large = d.chance(0.04)
    most = 2**20 if large else 300
    two = (
        (random.choice((512, 640)), random.choice((256, 512))) if large else d.shape(2, most, [n for n in EXTENTS if n])
    )
    a, b = two
    if kind == "same":
        shape = two if large else d.shape(most=most)
        return Group({s: shape}, {s: (shape, f"W[{s!r}]")})
    if kind in ("renamed", "tied"):
        names = [u, f"v{at}"][: 2 if kind == "tied" else 1]
        turned = d.chance(0.5)
        text = f"W[{s!r}].T" if turned else f"W[{s!r}]"
        rule = (*names, f"a b -> {', '.join(['b a'] * len(names))}") if turned else (*names,)
        return Group({s: two}, dict.fromkeys(names, ((b, a) if turned else two, text)), f"{s!r}: {rule}")
    if kind == "turned":
        c = random.choice((1, 2, 3))
        rule = f"{s!r}: ({u!r}, 'a b c -> c a b')"
        return Group({s: (a, b, c)}, {u: ((c, a, b), f"W[{s!r}].permute(2, 0, 1)")}, rule)
    if kind == "flat":
        return Group({s: two}, {u: ((a * b,), f"W[{s!r}].reshape(-1)")}, f"{s!r}: ({u!r}, 'a b -> (a b)')")
    if kind == "idle":
        return Group({s: two}, {}, f"{s!r}: None")
    if kind in ("stack", "unstack"):
        count = random.choice((2, 3, 12))
        names = [f"{s if kind == 'stack' else u}.{e}" for e in range(count)]
        if kind == "stack":
            text = f"torch.stack([W[f'{s}.{{e}}'] for e in range({count})], 1)"
            return Group(
                dict.fromkeys(names, two), {u: ((a, count, b), text)}, f"'{s}.{{e}}': ({u!r}, 'e a b -> a e b')"
            )
        targets = {name: (two, f"W[{s!r}][{e}]") for e, name in enumerate(names)}
        return Group({s: (count, *two)}, targets, f"{s!r}: ('{u}.{{e}}', 'e a b -> e a b')")
    c, names = random.choice((1, 2, 5)), (f"{s if kind == 'cat' else u}.a", f"{s if kind == 'cat' else u}.b")
    if kind == "cat":
        text = f"torch.cat([W[{names[0]!r}], W[{names[1]!r}]])"
        rule = f"{names}: ({u!r}, 'a b, c b -> (a + c) b')"
        return Group({names[0]: (a, b), names[1]: (c, b)}, {u: ((a + c, b), text)}, rule)
    h, g, k = random.choice((2, 4)), 2, random.choice((1, 3))
    text = f"W[{s!r}].view(2, {(h + g) * k}, {b})"
    parts = (slice(None, h * k), slice(h * k, None))
    sizes = (h, g)
    targets = {
        name: ((2 * size * k, b), f"{text}[:, {part.start or ''}:{part.stop or ''}].reshape(-1, {b})")
        for name, part, size in zip(names, parts, sizes, strict=True)
    }
    rule = (
        f"{s!r}: {(*names, f'(t{at} (h{at} k{at} + g{at} k{at})) b -> (t{at} h{at} k{at}) b, (t{at} g{at} k{at}) b')}"
    )
    return Group({s: (2 * (h + g) * k, b)}, targets, rule, {f"t{at}": 2, f"h{at}": h, f"g{at}": g})


def dtypes_of(d: Draw, found: Group) -> None:
    """The dtype of a group's sources, and of its targets: every number here is the same in both."""
    found.dtype = found.to = d.random.choice(DTYPES)
    if found.dtype in (torch.float32, torch.float64) and d.chance(0.4):
        found.to = d.random.choice((torch.float32, torch.bfloat16))
        d.features.add("another dtype")


def transfers(d: Draw) -> None:
    """`move(parts of W) == parts of rules(W)`, twice, into new tensors or old ones; `move.inverse` is the way back."""
    p, random = d.program, d.random
    sides = [[side(d, 2 * which + n) for n in range(random.choice((1, 1, 2)))] for which in range(2)]
    if d.chance(0.15):
        sides[1] = sides[0]
    groups = [group(d, at) for at in range(random.choice((1, 1, 2, 3)))]
    shapes: list[dict[str, Shape]] = [{}, {}]
    p.do("W, V, x, into = {}, {}, {}, {}")
    for each in groups:
        dtypes_of(d, each)
        for name, shape in each.sources.items():
            p.do(f"W[{name!r}] = whole({shape}, {d.seed()}, {each.dtype})")
        for name, (_, text) in each.targets.items():
            p.do(f"V[{name!r}] = ({text}).to({each.to})")
        shapes[0] |= each.sources
        shapes[1] |= {name: shape for name, (shape, _) in each.targets.items()}
    lies: list[dict[str, End]] = [{}, {}]
    forms: dict[str, Forms] = {}  # both specs of a tensor have the same names
    for which in range(2):
        for name, shape in shapes[which].items():
            one = random.choice(sides[which])
            forms[name] = forms.get(name) or d.forms(shape)
            lies[which][name] = one, d.spec(one[0], forms[name], indivisible=0.0)
            d.note(one[0], lies[which][name][1], shape)
    specs = [{name: spec for name, (_, spec) in ends.items()} for ends in lies]
    meshes = ["{" + ", ".join(f"{name!r}: {one[2]}" for name, (one, _) in ends.items()) + "}" for ends in lies]
    large = any(math.prod(shape) > 10**4 for shape in shapes[0].values())
    how = f"bucket_mb={random.choice((0.05, 64)) if large else random.choice((1e-4, 1e-3, 64))}"
    how += "".join(f", {name}={size}" for each in groups for name, size in each.sizes.items())
    if any(each.rule for each in groups):
        how += f", rules={{{', '.join(each.rule for each in groups if each.rule)}}}"
    if dtypes := {name: dtype_text(each.to) for each in groups for name in each.targets if each.to != each.dtype}:
        how += f", dtype={dtypes}"
    p.do(f"move = axes.transfer({specs[0]}, {specs[1]}, {meshes[0]}, {meshes[1]}, W, {how})")
    received = [sum(wanted(each, lies, rank) for each in groups) for rank in range(d.ranks)]
    p.do(f"assert [sum(s.bytes_in for s in move.at(base() + r).steps) for r in range({d.ranks})] == {received}")
    p.do(f"assert (move.lower_bound, move.bytes_in) == ({sum(received)}, {max(received)})")
    for name, ((grid, g, m, part), spec) in lies[0].items():
        layout, plain = random.choice(LAYOUTS), d.chance(0.5)
        if plain or part or grid.here is None or refusal(grid, spec, shapes[0][name]) is not None:
            p.do(f"if {g}.here is not None: x[{name!r}] = laid(part(W[{name!r}], {g}, {spec!r}), {layout!r})")
        else:
            p.do(f"x[{name!r}] = axes.shard(W[{name!r}], {spec!r}, mesh={m})")
    written = d.chance(0.5)
    for name, ((_, g, *_), spec) in lies[1].items() if written else ():
        d.features.add("written in place")
        layout, like = random.choice(("dense", "transposed", "strided", "offset")), f"part(V[{name!r}], {g}, {spec!r})"
        if d.chance(0.7):
            p.do(f"if {g}.here is not None: into[{name!r}] = laid(torch.zeros_like({like}), {layout!r})")
    present = ", ".join(f"{name!r}: {one[1]}.here" for name, (one, _) in lies[1].items())
    for _ in range(2):
        p.do("for value in into.values(): value.zero_()")
        p.do(f"y = move(x{', into' if written else ''})")
        p.do("assert all(y[name] is value for name, value in into.items())")
        p.do(f"assert {{*y}} == {{n for n, here in {{{present}}}.items() if here is not None}}, {{*y}}")
        for name, ((_, g, *_), spec) in lies[1].items():
            p.do(f"if {g}.here is not None: check(y[{name!r}], V[{name!r}], {g}, {spec!r})")
    p.do("z = move.inverse(y)")
    for name in [name for each in groups if each.targets for name in each.sources]:
        (_, g, *_), spec = lies[0][name]
        p.do(f"if {g}.here is not None: check(z[{name!r}], W[{name!r}], {g}, {spec!r})")
    if all(len({text for _, text in each.targets.values()}) == len(each.targets) for each in groups):
        p.do("assert move.inverse.inverse.lower_bound == move.lower_bound")


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wanted(each: Group, lies: Sequence[dict[str, End]], rank: int) -> int:
    """The bytes that a rank of the island wants and hasn't, by which elements it holds."""
    labels, begin = dict[str, torch.Tensor](), 0
    for name, shape in each.sources.items():
        labels[name] = torch.arange(begin, begin + math.prod(shape)).reshape(shape)
        begin += math.prod(shape)
    has = np.concatenate([held(labels[name], lies[0][name], rank) for name in each.sources])
    found = 0
    for name, (_, text) in each.targets.items():
        wants = held(eval(text, {"W": labels, "torch": torch}), lies[1][name], rank)
        found += int((~np.isin(wants, has)).sum()) * each.to.itemsize
    return found


def held(labels: torch.Tensor, end: End, rank: int) -> np.ndarray:
    """The labels that a rank of the island holds."""
    (grid, *_), spec = end
    if rank not in grid.ranks:
        return np.zeros(0, dtype=np.int64)
    pieces = grid.pieces(spec, tuple(labels.shape), grid.ranks.index(rank))
    return labels.numpy()[np.ix_(*pieces)].reshape(-1) if pieces else labels.numpy().reshape(-1)
