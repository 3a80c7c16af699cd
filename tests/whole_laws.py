"""Laws on generated cases: what every sharding, move, operation, gradient and result must satisfy.

Each law draws one case and runs it, on all ranks of an island alike (see `tests.whole_cases`). What
is right is what torch does with the whole tensor. `work` goes through cases on this rank's island;
`python -m tests.whole_laws` looks for failures and prints each kind once, as a program:

    python -m tests.whole_laws --law chain --ranks 4 --cases 500
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import axes
from tests.flow_cases import Case
from tests.flow_cases import case as flow_case
from tests.strategies import place
from tests.whole_cases import (
    DTYPES,
    LAYOUTS,
    OPS,
    PART_OF_AN_AXIS,
    TIMEOUT,
    Draw,
    Grid,
    Pending,
    TorchRefuses,
    commute,
    cuts_between_names,
    features_of,
    on_island,
    pending_text,
    read,
    refusal,
    watch,
    without_pending,
    words,
)

Law = Callable[[Draw], None]


# ---------------------------------------------------------------------------- one tensor


def drawn_dtype(d: Draw, choices: Sequence[torch.dtype] = DTYPES) -> torch.dtype:
    dtype = d.random.choice(choices) if d.chance(0.4) else torch.float64
    d.features.add(f"{dtype}".removeprefix("torch."))
    return dtype


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """What can be pending of a dtype."""
    if dtype is torch.bool:
        return ("max", "min")
    if dtype.is_complex:
        return ("sum",)
    return OPS if dtype.is_floating_point else ("sum", "max", "min")


def mesh_of(name: str) -> str:
    return f"m{name[1:]}"


def make_whole(d: Draw, name: str, shape: Sequence[int], dtype: torch.dtype, grid: str, layout: str = "dense") -> None:
    """A whole tensor, another one for each of the sub-meshes side by side."""
    text = f"{name} = whole({tuple(shape)}, {d.seed()} + {grid}.line"
    d.program.do(text + (")" if dtype is torch.float64 else f", {dtype})"))
    if layout == "expanded" and shape and shape[0]:
        d.program.do(f"{name} = {name}[:1].expand_as({name}).clone()")


def drawn_layout(d: Draw) -> str:
    layout = d.random.choice(LAYOUTS)
    if layout != "dense":
        d.features.add(f"stride {layout}")
    return layout


def laid_text(value: str, layout: str) -> str:
    return value if layout == "dense" else f"laid({value}, {layout!r})"


def whole(d: Draw) -> None:
    """`unshard(shard(W, s)) == W == shard(W, s).full_tensor()`, and there and back by every door."""
    p = d.program
    dtype = drawn_dtype(d)
    grid, g = d.grid(elsewhere=0.1)
    m, shape = mesh_of(g), d.shape()
    pending = 0.35 if d.chance(0.4) else 0.0
    forms = d.forms(shape)
    spec = d.spec(grid, forms, pending=pending, ops=ops_of(dtype), indivisible=0.1)
    d.note(grid, spec, shape)
    layout = drawn_layout(d)
    make_whole(d, "W", shape, dtype, g, layout)
    seed, inside = d.seed(), grid.here is not None
    reason = refusal(grid, spec, shape)
    door = "shard" if "|" not in spec and d.chance(0.6) else "from_local"
    made = (
        f"axes.shard({laid_text('W', layout)}, {spec!r}, mesh={m})"
        if door == "shard"
        else f"axes.from_local({laid_text(f'part(W, {g}, {spec!r}, {seed})', layout)}, {spec!r}, mesh={m}{sized(d, grid, spec, shape)})"
    )
    if reason is not None:
        d.features.add("refused")
        if "doesn't divide into" in reason and door == "from_local":
            made = f"axes.shard(W, {without_pending(spec)!r}, mesh={m})"  # there is no shard of it
        p.refuse(made, reason)
        return
    if door == "from_local" and not inside:
        made = f"axes.from_local(W.new_empty({(0,) * len(shape)}), {spec!r}, mesh={m}, shape={shape})"
    p.do(f"x = {made}")
    p.do(f"check(x, W, {g}, {spec!r}, {seed})")
    if inside:
        p.do(f"assert uses_groups_of(x, {m})")
    if inside:
        p.do(f"assert tuple(x.to_local().shape) == {m}.sharding({spec!r}).local_shape({shape})")
        p.do(f"same_indices({m}.sharding({spec!r}), {g}, {spec!r}, {shape})")
        if len({op for op, _ in read(spec, shape)[1]}) < 2:
            p.do(f"assert axes.sharding_of(x).is_equivalent({m}.sharding({spec!r}), {shape}), axes.spec_of(x)")
        p.do(f"assert {m}.sharding(axes.spec_of(x)).placements == x.placements, axes.spec_of(x)")
    if inside:
        p.do("same(axes.unshard(x), W, 'unshard')")
    ops = [op for op, _ in read(spec, shape)[1]]
    if inside and all(commute(one, two) for one in ops for two in ops):
        p.do("same(x.full_tensor(), W, 'full_tensor')")
    if d.chance(0.3) and "|" not in spec:
        factory(d, g, spec, shape, {n: s for form in forms for n, s in form if n})
    elif d.chance(0.3) and "|" not in spec and not grid.sub:
        source = d.random.choice(grid.ranks)
        here = f"{g}.here == {grid.ranks.index(source)}"
        p.do(f"y = axes.shard(W if {here} else torch.zeros_like(W), {spec!r}, mesh={m}, source_rank=base() + {source})")
        p.do(f"check(y, W, {g}, {spec!r})")


def factory(d: Draw, g: str, spec: str, shape: Sequence[int], sizes: dict[str, int]) -> None:
    """Tensors from nothing; random ones are the same in every sharding."""
    p, m, shape = d.program, mesh_of(g), tuple(shape)
    d.features.add("factory")
    name = d.random.choice(("full", "ones", "zeros", "rand", "randn", "empty"))
    options = f"mesh={m}, sizes={sizes}, dtype=torch.float64"
    if 0 in sizes.values():
        p.refuse(f"axes.{name}({spec!r}, {'2.5, ' if name == 'full' else ''}{options})", "a whole number from 1")
        return
    if name in ("rand", "randn"):
        bare = {f"e{i}": n for i, n in enumerate(shape)}
        p.do(f"torch.manual_seed(1); x = axes.{name}({spec!r}, {options})")
        p.do(f"torch.manual_seed(1); y = axes.{name}({' '.join(bare)!r}, mesh={m}, sizes={bare}, dtype=torch.float64)")
        p.do(f"check(x, axes.unshard(y), {g}, {spec!r})" if d.program[g].here is not None else "pass")
    elif name == "empty":
        p.do(f"assert tuple(axes.empty({spec!r}, {options}).shape) == {shape}")
    else:
        value = {"full": 2.5, "ones": 1.0, "zeros": 0.0}[name]
        p.do(f"x = axes.{name}({spec!r}, {'2.5, ' if name == 'full' else ''}{options})")
        p.do(f"check(x, torch.full({shape}, {value}, dtype=torch.float64), {g}, {spec!r})")


# ---------------------------------------------------------------------------- chains of shardings


def next_grid(d: Draw, grid: Grid, elsewhere: float) -> tuple[Grid, str]:
    """The grid of a next sharding: the same one, other names and factorizations of it, or other ranks."""
    if grid.sub or d.chance(0.55):
        return grid, d.named(grid)
    found, g = d.grid(elsewhere=elsewhere, sub=False)
    if found != grid:
        d.features.add("another mesh")
    if found.ranks != grid.ranks:
        d.features.add("another universe")
    return found, g


def kept_pending(d: Draw, grid: Grid, spec: str, shape: Sequence[int], to: Grid) -> Pending:
    """Which reductions stay pending, in the names of the next grid, so that what is done comes first."""
    pending = [(op, name) for op, names in read(spec, tuple(shape))[1] for name in names]
    if to.ranks != grid.ranks or not pending or d.chance(0.5):
        return ()
    kept = []
    for op, name in pending:
        new = next(
            (
                n
                for n in to.names
                if n in to.axis_names and (to.table[n] == grid.table[name]).all() and to.sizes[n] == grid.sizes[name]
            ),
            None,
        )
        if new is None or any(k == (new,) for _, k in kept):
            kept = []
            continue
        if d.chance(0.6):
            kept.append((op, (new,)))
        elif not all(commute(op, other) for other, _ in kept):
            kept = []  # what comes before is done before
    return tuple(kept)


def chain(d: Draw) -> None:
    """`reshard` through any chain of shardings is the direct one."""
    p = d.program
    dtype = drawn_dtype(d)
    moving = d.chance(0.25)
    grid, g = d.grid(elsewhere=0.2 if moving else 0.0)
    shape = d.shape()
    start = grid, d.accepted(grid, shape, pending=0.5 if d.chance(0.6) else 0.0, ops=ops_of(dtype))
    d.note(*start, shape)
    layout = drawn_layout(d)
    make_whole(d, "W", shape, dtype, g, layout)
    seed = d.seed()
    make_door(d, "x", "W", grid, g, start[1], seed, layout)
    spec, name = start[1], "x"
    for step in range(d.random.choice((1, 1, 2, 2, 3, 4))):
        to, t = next_grid(d, grid, 0.4 if moving else 0.0)
        keep = kept_pending(d, grid, spec, shape, to)
        target = d.target(to, shape, keep=keep, indivisible=0.05)
        again = d.chance(0.5)
        d.note(to, target, shape)
        reason = refusal(to, target, shape)
        options = ""
        if d.chance(0.3):
            options = ", async_op=True"
            d.features.add("async")
        line = f"axes.reshard({name}, {mesh_of(t)}.sharding({target!r}).sized({shape}){options})"
        if d.chance(0.4):
            d.features.add("as text")
            text = with_stars(d, spec, target) if to == grid and reason is None else target
            line = f"axes.reshard({name}, {text!r}, mesh={mesh_of(t)}{options})"
        if reason is not None:
            d.features.add("refused")
            p.refuse(line, reason)
            continue
        new = f"y{step}"
        if to == grid and len(grid.ranks) == d.ranks and not options and d.chance(0.2):
            d.features.add("plan")
            p.do(f"steps = axes.plan(axes.sharding_of({name}), {mesh_of(t)}.sharding({target!r}), {shape}).collectives")
            p.do(f"with CommDebugMode() as mode: {new} = {line}")
            p.do("assert mode.get_total_counts() == steps, (mode.get_comm_counts(), steps)")
        elif grid.here is None and to.here is None:
            p.do(
                f"{new} = axes.from_local(W.new_empty({(0,) * len(shape)}), {target!r}, mesh={mesh_of(t)}, shape={shape})"
            )
        else:
            p.do(f"{new} = {line}")
        if options and "|" not in target and d.chance(0.7):
            p.do(f"{new} = {new}.clone()")
        p.do(f"check({new}, W, {t}, {target!r}, {seed}, (g0, {start[1]!r}))")
        if to.here is not None and "groups of its own" in d.features:
            p.do(f"assert uses_groups_of({new}, {mesh_of(t)})")
        if again:
            p.do(f"check({name}, W, {d.grids[grid]}, {spec!r}, {seed}, (g0, {start[1]!r}))")
        grid, spec, name = to, target, new
    if grid.here is not None:
        p.do(f"same(axes.unshard({name}), W)")


def sized(d: Draw, grid: Grid, spec: str, shape: Sequence[int]) -> str:
    """What says the whole size of a shard: its shape, the sizes of some names, or nothing, so that ranks tell each other."""
    if grid.here is None or d.chance(0.4):
        return f", shape={tuple(shape)}"
    dims = read(without_pending(spec), tuple(shape))[0]
    names = {name: size for dim in dims for name, size, _ in dim if name and name.isidentifier() and size}
    given = {name: size for name, size in names.items() if d.chance(0.3)}
    d.features.add("some sizes given" if given else "no size given")
    return f", sizes={given}" if given else ""


def with_stars(d: Draw, spec: str, target: str) -> str:
    """The target as text in which a `*` may stand for what the spec has as well."""
    (had, _, waits), (wanted, bar, pending) = (text.partition("|") for text in (spec, target))
    found = []
    for mine, word in zip(words(had), words(wanted), strict=True):
        name, _, place = word.partition("@")
        alike = "(" not in name and "(" not in mine.partition("@")[0] and place == mine.partition("@")[2]
        found.append(f"{name}@*" if alike and d.chance(0.5) else word)
    if waits.split() and waits.split() == pending.split() and d.chance(0.5):
        pending = " *"
    return " ".join([*found, *([bar + pending] if bar else [])])


def make_door(
    d: Draw, x: str, value: str, grid: Grid, g: str, spec: str, seed: int, layout: str = "dense", tail: str = ""
) -> None:
    """A DTensor of a whole tensor by one of the two doors."""
    m, shape = mesh_of(g), tuple(d.program[value].shape)
    if "|" not in spec and d.chance(0.5):
        d.program.do(f"{x} = axes.shard({laid_text(value, layout)}, {spec!r}, mesh={m}){tail}")
    elif grid.order is not None and len(grid.order) < d.ranks:
        local = f"(part({value}, {g}, {spec!r}, {seed}) if {g}.here is not None else {value}.new_empty({(0,) * len(shape)}))"
        d.program.do(f"{x} = axes.from_local({local}, {spec!r}, mesh={m}, shape={shape}){tail}")
    else:
        local = laid_text(f"part({value}, {g}, {spec!r}, {seed})", layout)
        d.program.do(f"{x} = axes.from_local({local}, {spec!r}, mesh={m}{sized(d, grid, spec, shape)}){tail}")


def shards(d: Draw) -> None:
    """The same on plain shards, by text: left of `->` what the shard is, right of it what it becomes."""
    p = d.program
    dtype = drawn_dtype(d)
    grid, g = d.grid()
    m, shape = mesh_of(g), d.shape()
    forms = d.forms(shape, numbers=0.0)
    spec = d.spec(grid, forms, pending=0.4 if d.chance(0.5) else 0.0, ops=ops_of(dtype), indivisible=0)
    d.features.add("local view")
    d.note(grid, spec, shape)
    layout = drawn_layout(d)
    make_whole(d, "W", shape, dtype, g, layout)
    seed, start = d.seed(), spec
    p.do(f"x = {laid_text(f'part(W, {g}, {spec!r}, {seed})', layout)}")
    sizes = {n: s for form in forms for n, s in form if s}
    for _ in range(d.random.choice((1, 1, 2))):
        keep = kept_pending(d, grid, spec, shape, grid)
        target = d.spec(grid, forms, keep=keep, indivisible=0)
        d.note(grid, target, shape)
        options = ", async_op=True" if d.chance(0.3) else ""
        d.features |= {"async"} if options else set()
        line = f"x = axes.reshard(x, {f'{spec} -> {target}'!r}, mesh={m}, sizes={sizes}{options})"
        if cuts_between_names(grid, spec, target, forms):
            p.refuse(line, "don't fall on its names")
            d.features.add("refused")
            continue
        p.do(line)
        if options:
            p.do("x = x.clone()")
        p.do(f"check(x, W, {g}, {target!r}, {seed}, ({g}, {start!r}))")
        spec = target


# ---------------------------------------------------------------------------- gradients

UNARY = ("torch.tanh({})", "{} * 2", "{}.clone()", "{}.relu()", "{} + {}", "{} * {}", "-{}", "torch.exp({} / 8)")
NONLINEAR = ("torch.tanh({})", "{} * {}", "torch.exp({} / 8)", "{} * {} * {}")


def cotangent(d: Draw, name: str, value: str, grid: Grid, g: str, like: str) -> None:
    """A gradient of a DTensor, in any sharding that DTensor can have: split, whole or pending."""
    shape = tuple(d.program[value].shape)
    spec = d.accepted(grid, shape, pending=0.3, ops=("sum", "mean")) if d.chance(0.7) else like
    make_whole(d, name.upper(), shape, torch.float64, g)
    make_door(d, name, name.upper(), grid, g, spec, d.seed())


def gradients(d: Draw) -> None:
    """The gradient of every leaf through operations of torch and moves of ours, several times and derived again."""
    p = d.program
    grid, g = d.grid(computed=True)
    shape = d.shape(most=200)
    spec = d.accepted(grid, shape, pending=0.15 if d.chance(0.2) else 0.0, ops=("sum", "mean"))
    second = "|" not in spec and d.chance(0.3)
    d.note(grid, spec, shape)
    d.features.add("gradient")
    names = ["a", "b"] if d.chance(0.4) else ["a"]
    layout = drawn_layout(d)
    for name in names:
        make_whole(d, name.upper(), shape, torch.float64, g, layout)
        make_door(d, name, name.upper(), grid, g, spec, d.seed(), layout)
        leaf(d, name, grid, g, spec)
    h = "a"
    if d.chance(0.6) or second:
        template = d.random.choice(NONLINEAR if second else UNARY)
        p.both(f"h = {template.format(*['a'] * 3)}", "h", "a")
        h = "h"
        d.features.add("operation of torch before")
    if len(names) > 1 and d.chance(0.4):
        p.both(f"k = {h} * b", "k", h, "b")
        h, names = "k", names
    elif len(names) > 1:
        d.features.add("two leaves")
        h = f"{h} b"
    to, t, target = grid, g, spec
    outputs = []
    for number, each in enumerate(h.split()):
        here = grid
        move = target if number and d.chance(0.7) else None
        for step in range(d.random.choice((1, 1, 2)) if move is None else 1):
            if number == 0:
                to, t = next_grid(d, here, 0.0)
                target = d.accepted(to, shape, pending=0.0)
            y = f"y{number}{step}"
            options = ", async_op=True" if d.chance(0.25) else ""
            d.features |= {"async"} if options else set()
            p.do(f"{y} = axes.reshard({each}, {mesh_of(t)}.sharding({target!r}).sized({shape}){options})")
            p.do(f"{y.upper()} = {each.upper()}")
            d.note(to, target, shape)
            each, here = y, to
            if number:
                break
        outputs.append(each)
    y = outputs[0]
    if len(outputs) > 1:
        p.both(f"y = {outputs[0]} {d.random.choice(('+', '*', '-'))} {outputs[1]}", "y", *outputs)
        y = "y"
    if d.chance(0.4):
        p.both(f"z = {d.random.choice(UNARY).format(*[y] * 3)}", "z", y)
        d.features.add("operation of torch after")
        y = "z"
    if second:
        twice(d, y, names, grid, g, spec, to, t, target)
        return
    backward(d, y, names, grid, g, spec, to, t, target)


def backward(
    d: Draw, y: str, names: Sequence[str], grid: Grid, g: str, spec: str, to: Grid, t: str, target: str
) -> None:
    """Several backward passes, with gradients that are changed in between."""
    p = d.program
    passes = d.random.choice((1, 1, 2, 3))
    for number in range(passes):
        c = f"c{number}"
        cotangent(d, c, y.upper(), to, t, without_pending(target))
        keep = ", retain_graph=True" if number + 1 < passes else ""
        p.both(f"{y}.backward({c}{keep})", y, c)
        if number:
            d.features.add("second backward")
        for name in names:
            check_gradient(d, name, g, spec)
            if number == 0:
                p.do(f"owns({name}.grad)")
        if keep and d.chance(0.6):
            d.features.add("gradient changed in place")
            change = d.random.choice(("mul_(3)", "zero_()"))
            p.both(f"{names[0]}.grad.{change}", names[0])
            for name in names:
                check_gradient(d, name, g, spec)


def leaf(d: Draw, name: str, grid: Grid, g: str, spec: str) -> None:
    """Makes a DTensor a leaf: by torch, or it is made as one."""
    p = d.program
    if "|" not in spec and d.chance(0.4):
        d.features.add("made as a leaf")
        p.do(f"{name} = axes.shard({name.upper()}.clone().requires_grad_(), {spec!r}, mesh={mesh_of(g)})")
        p.do(f"{name.upper()}.requires_grad_(); {name}.retain_grad()")
    else:
        p.both(f"{name}.requires_grad_()", name)


def check_gradient(d: Draw, name: str, g: str, spec: str) -> None:
    """The gradient of a leaf that axes made, in the leaf's own sharding."""
    d.program.do(f"check({name}.grad, {name.upper()}.grad, {g}, {without_pending(spec)!r})")


def twice(d: Draw, y: str, names: Sequence[str], grid: Grid, g: str, spec: str, to: Grid, t: str, target: str) -> None:
    """The derivative of a gradient."""
    p = d.program
    d.features.add("second derivative")
    cotangent(d, "c", y.upper(), to, t, without_pending(target))
    differentiated(d, "c")
    p.both(f"u, = torch.autograd.grad({y}, a, c, create_graph=True)", "u", y, "a", "c")
    p.do("same(whole_of(u), U.detach(), 'the first derivative')")
    cotangent(d, "v", "U", grid, g, without_pending(spec))
    if p["U"].requires_grad:
        p.both("u.backward(v)", "u", "v")
    for name in names:
        if p[name.upper()].grad is not None:
            check_gradient(d, name, g, spec)
    check_differentiated(d, "c")


def differentiated(d: Draw, cotangent: str) -> None:
    """Half of the cotangents need a gradient themselves."""
    if not axes.sharding_of(d.program[cotangent]).pending and d.chance(0.5):
        d.program.both(f"{cotangent}.requires_grad_()", cotangent)


def check_differentiated(d: Draw, cotangent: str) -> None:
    if d.program[cotangent.upper()].grad is not None:
        d.program.do(f"same(whole_of({cotangent}.grad), {cotangent.upper()}.grad, 'the gradient of the cotangent')")


# ---------------------------------------------------------------------------- results that are changed in place


def moved_somehow(d: Draw, x: str, y: str, grid: Grid, g: str, spec: str, shape: Sequence[int]) -> str | None:
    """`y` is `x` moved, turned or taken apart; `Y` is a copy of `X` so. The spec of `y`, None where it is plain."""
    p, m, shape = d.program, mesh_of(g), tuple(shape)
    kind = d.random.choice(
        ("reshard", "reshard", "same", "rearrange", "rearrange", "einsum", "region", "region", "unshard")
    )
    d.features.add(f"move by {kind}")
    if kind == "reshard":
        target = d.accepted(grid, shape)
        p.do(f"{y} = axes.reshard({x}, {m}.sharding({target!r}).sized({shape}))")
        p.do(f"{y.upper()} = {x.upper()}.clone()")
        return target
    if kind == "same":
        p.do(f"{y} = axes.reshard({x}, axes.sharding_of({x}))")
        p.do(f"{y.upper()} = {x.upper()}.clone()")
        return spec
    if kind == "unshard":
        p.do(f"{y} = axes.unshard({x})")
        p.do(f"{y.upper()} = {x.upper()}.clone()")
        return None
    dims = words(without_pending(spec))
    if any("(" in dim and re.search(r"[( ]\d", dim) for dim in dims) or 0 in shape or kind == "region":
        p.do(
            f"{y} = axes.shard_map({d.random.choice(REGIONS)}, {' '.join(f'd{i}' for i in range(len(shape)))!r} + ' -> ' + {' '.join(f'd{i}' for i in range(len(shape)))!r}, mesh={m})({x})"
        )
        p.do(f"{y.upper()} = {x.upper()}.clone()")
        return spec
    order = d.random.sample(range(len(dims)), len(dims))
    right = " ".join(dims[i] for i in order)
    sizes = {n: s for dim in read(spec, shape)[0] for n, s, _ in dim if n and n.isidentifier()}
    call = (
        f"axes.rearrange({x}, {f'{spec} -> {right}'!r}"
        if kind == "rearrange"
        else f"axes.einsum({x}, {f'{spec} -> {right}'!r}"
    )
    p.do(f"{y} = {call}, mesh={m}, sizes={sizes})")
    p.do(f"{y.upper()} = {x.upper()}.permute({tuple(order)}).clone()")
    return right


REGIONS = (
    "lambda t: t",
    "lambda t: t.clone()",
    "lambda t: t.view(t.shape)",
    "lambda t: t.detach().requires_grad_(t.requires_grad) if not t.requires_grad else t * 1",
)


def inplace(d: Draw) -> None:
    """A result that is changed in place changes nothing else, or autograd says so."""
    p = d.program
    grid, g = d.grid(computed=True)
    shape = d.shape(most=200)
    spec = d.accepted(grid, shape)
    d.note(grid, spec, shape)
    d.features.add("in place")
    if d.chance(0.25):
        d.features.add("local view")
        inplace_of_shards(d, grid, g, shape)
        return
    make_whole(d, "A", shape, torch.float64, g)
    make_door(d, "a", "A", grid, g, spec, d.seed())
    kept = d.chance(0.3)  # x is data, which the gradient of a needs
    if kept:
        make_whole(d, "X", shape, torch.float64, g)
        make_door(d, "x", "X", grid, g, spec, d.seed())
        p.both("a.requires_grad_()", "a")
        p.both("s = a * x", "s", "a", "x")
    else:
        p.both("a.requires_grad_()", "a")
        p.both(
            f"x = {d.random.choice(('torch.tanh({})', 'torch.exp({} / 8)', '{} * {}', '{} * 1', 'torch.sigmoid({})')).format('a', 'a')}",
            "x",
            "a",
        )
    if d.chance(0.12):
        d.features.add("region that writes")
        line = " ".join(f"d{i}" for i in range(len(shape)))
        p.do("keep = whole_of(x).clone()")
        p.do(
            f"seen = fails(lambda: axes.shard_map(lambda t: t.mul_(2), {f'{line} -> {line}'!r}, mesh={mesh_of(g)})(x))"
        )
        p.do("assert seen or fails(lambda: s.sum().backward()), 'autograd did not see the write'")
        return
    target = moved_somehow(d, "x", "y", grid, g, spec, shape)
    if d.chance(0.3):
        moved_somehow(d, "x", "z", grid, g, spec, shape)
        p.do("kept = [whole_of(z).clone() if isinstance(z, DTensor) else z.detach().clone()]")
    p.do("keep = whole_of(x).clone()")
    change = d.random.choice(("y.mul_(2)", "y.add_(1)", "y.zero_()", "y.relu_()", "y.copy_(y * 3)"))
    itself = p["y"] is p["x"]
    if itself and not kept:
        return
    p.do(f"seen = fails(lambda: {change})")
    if not itself:
        p.do("same(whole_of(x), keep, 'the operand')")
        if any(line.startswith("kept = ") for line in p.lines) and p["z"] is not p["x"]:
            p.do("same(whole_of(z) if isinstance(z, DTensor) else z, kept[0], 'another result')")
    if p["seen"]:
        d.features.add("change refused")
        return
    p.do(re.sub(r"\by\b", "Y", change))
    result = "s" if kept else "y"
    if target is None and not kept:
        make_whole(d, "C", p["Y"].shape, torch.float64, g)
        p.do("c = C")
    else:
        cotangent(d, "c", result.upper(), grid, g, spec if kept else without_pending(target or spec))
    if kept:
        p.do("seen = fails(lambda: s.backward(c))")
        p.do("S.backward(C)")
    else:
        cotangent(d, "e", "X", grid, g, spec)
        p.do("seen = fails(lambda: torch.autograd.backward([x, y], [e, c]))")
        p.do("torch.autograd.backward([X, Y], [E, C])")
    if p["seen"]:
        d.features.add("change seen in backward")
    else:
        check_gradient(d, "a", g, spec)


# ---------------------------------------------------------------------------- operations


def pending_in(sharding: axes.Sharding) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What is pending, by the names of the mesh."""
    found = re.findall(r"(\w+)@(\(.*?\)|\S+)", sharding.spec.partition("|")[2])
    return tuple((op, tuple(place.strip("()").split())) for op, place in found)


def spec_of_case(
    grid: Grid, found: Case, slots: Sequence[Sequence[str]], splits: Mapping[str, Sequence[str]], pending: Pending = ()
) -> str:
    """The spec of an operand or of the result of a drawn expression."""
    dims = []
    for slot in slots:
        more = [name for name in slot if found.sizes[name] != 1 or parts(grid, splits[name]) > 1]
        if len(slot) == 1 or (len(more) == 1 and all(found.sizes[name] == 1 for name in slot if name not in more)):
            (name,) = slot if len(slot) == 1 else more
            dims.append(f"{name}{place(splits[name])}")  # a group of which one name has a size is that name
        else:
            dims.append(f"({' '.join(f'{name}={found.sizes[name]}{place(splits[name])}' for name in slot)})")
    return " ".join(dims) + pending_text(pending)


def refusal_of_case(grid: Grid, found: Case, result: str) -> str | None:
    """Why an expression whose operands DTensor can carry is refused; None where it isn't."""
    reasons = [refusal(grid, result, result_shape(found))]
    if uneven_inside(grid, found):
        reasons.append("uneven parts inside|doesn't divide into")
    if mean_stays_uneven(grid, found):
        reasons.append("a mean over uneven shards")
    return "|".join(filter(None, reasons)) or None


def uneven_inside(grid: Grid, found: Case) -> bool:
    """Whether a name would be split unevenly in a group of the result with other names."""
    for slot in found.result:
        for name in slot:
            others = [other for other in slot if other != name]
            alone = all(found.sizes[other] == 1 and parts(grid, found.goals[other]) == 1 for other in others)
            if not alone and found.sizes[name] % parts(grid, found.goals[name]):
                return True
    return False


def parts(grid: Grid, names: Sequence[str]) -> int:
    """Into how many parts axes split; an axis of one rank splits nothing."""
    return math.prod(grid.sizes[name] for name in names)


def result_shape(found: Case) -> tuple[int, ...]:
    return tuple(math.prod(found.sizes[name] for name in slot) for slot in found.result)


def mean_stays_uneven(grid: Grid, found: Case) -> bool:
    """Whether a mean over a dim that doesn't divide would be left pending as a mean; `| *` leaves a sum."""
    if found.op != "mean":
        return False
    kept = {name for slot in found.result for name in slot}
    left = " ".join(word for word in words(found.text.partition("->")[2].partition("|")[2]) if word.startswith("mean@"))
    for name, axes_ in found.places.items():
        count = math.prod(grid.sizes[axis] for axis in axes_)
        if name not in kept and found.sizes[name] % count and set(axes_) & places_in(left):
            return True
    return False


def operations(d: Draw) -> None:
    """Every expression equals itself on the whole tensor, and so do its gradients, in both views."""
    p = d.program
    local = d.chance(0.4)
    grid, g = d.grid(computed=True)
    m = mesh_of(g)
    kind = d.random.choice(("rearrange", "reduce", "reduce", "repeat", "einsum", "einsum"))
    found = flow_case(d.random, kind=kind, everything_explicit=local, mesh=grid.mesh)
    if any(math.prod(shape) > 2000 for shape in [*found.shapes, result_shape(found)]):
        return
    d.features |= {f"operation {found.kind}", *({f"reduce {found.op}"} if found.kind == "reduce" else ())}
    names = [*"uvw"[: len(found.operands)]]
    pendings = list(map(pending_in, found.shardings))
    specs = [
        spec_of_case(grid, found, slots, found.places, q) for slots, q in zip(found.operands, pendings, strict=True)
    ]
    reasons = [refusal(grid, spec, shape) for spec, shape in zip(specs, found.shapes, strict=True)]
    for spec, shape in zip(specs, found.shapes, strict=True):
        d.note(grid, spec, shape)
    if local:
        d.features.add("local view")
        plain_operation(d, found, grid, g, names, specs)
        return
    seeds = [d.seed() for _ in names]
    layout, dtype = drawn_layout(d), torch.float64
    if kind == "einsum" and not any(pendings) and d.chance(0.4):
        dtype = d.random.choice((torch.int32, torch.uint8))
        d.features.add("einsum of integers")
    for name, spec, shape, seed, reason in zip(names, specs, found.shapes, seeds, reasons, strict=True):
        make_whole(d, name.upper(), shape, dtype, g, layout)
        if reason:
            d.features.add("refused")
            p.refuse(
                f"axes.from_local(part({name.upper()}, {g}, {spec!r}, {seed}), {spec!r}, mesh={m}, shape={shape})",
                reason,
            )
            return
        make_door(d, name, name.upper(), grid, g, spec, seed, layout)
    pending_extreme = found.op in ("max", "min") and any(pendings)
    with_gradient = d.chance(0.7) and not pending_extreme and dtype.is_floating_point
    if with_gradient:
        d.features.add("gradient")
        for name, spec in zip(names, specs, strict=True):
            leaf(d, name, grid, g, spec)
    used = list(names)
    if d.chance(0.3) and with_gradient and not any(pendings):
        d.features.add("operation of torch before")
        at = d.random.randrange(len(names))
        p.both(f"t = {d.random.choice(NONLINEAR).format(*[names[at]] * 3)}", "t", names[at])
        used[at] = "t"
    result = spec_of_case(grid, found, found.result, found.goals)
    line = call_of(found, used, m, ", async_op=True" if d.chance(0.2) else "")
    d.features |= {"async"} if "async_op" in line else set()
    whole_line = f"Y = whole_result({found.kind!r}, {found.text!r}, {found.op!r}, [{', '.join(u.upper() for u in used)}], {found.sizes})"
    reason = refusal_of_case(grid, found, result)
    if reason:
        d.features.add("refused")
        p.refuse(line, reason)
        return
    p.do(f"y = {line}")
    p.do(whole_line)
    if "async_op" in line:
        p.both("y = y.clone()" if not axes.sharding_of(p["y"]).pending else "y = y", "y")
    kept = bool(axes.sharding_of(p["y"]).pending)
    if kept:
        p.do("same(axes.unshard(y), Y)")
    else:
        p.do(f"check(y, Y, {g}, {result!r})")
    if not with_gradient or (found.op in ("max", "min") and kept) or not p["Y"].requires_grad:
        return
    y = "y"
    if not kept and d.chance(0.3):
        p.both(f"z = {d.random.choice(UNARY).format(*['y'] * 3)}", "z", "y")
        y = "z"
        d.features.add("operation of torch after")
    if d.chance(0.6 if found.op in ("max", "min", "prod") else 0.25) and not any(pendings):
        at = d.random.randrange(len(names))
        second_derivative(d, y, names, names[at], grid, g, specs, specs[at])
        return
    for number in range(d.random.choice((1, 1, 2))):
        cotangent(d, f"c{number}", "Y", grid, g, result)
        p.both(f"{y}.backward(c{number}, retain_graph=True)", y, f"c{number}")
        d.features |= {"second backward"} if number else set()
        for name, spec in zip(names, specs, strict=True):
            check_gradient(d, name, g, spec)
            p.do(f"owns({name}.grad)")


def second_derivative(
    d: Draw, y: str, names: Sequence[str], by: str, grid: Grid, g: str, specs: Sequence[str], spec: str
) -> None:
    """The derivative of the gradient of one operand by all of them, and by the cotangent."""
    p = d.program
    d.features.add("second derivative")
    cotangent(d, "c", y.upper(), grid, g, " ".join(f"d{i}" for i in range(p[y.upper()].ndim)))
    differentiated(d, "c")
    p.both(f"o, = torch.autograd.grad({y}, {by}, c, create_graph=True)", "o", y, by, "c")
    p.do("same(whole_of(o), O.detach(), 'the first derivative')")
    cotangent(d, "v2", "O", grid, g, spec)
    if not p["O"].requires_grad:
        return
    p.both("o.backward(v2)", "o", "v2")
    for name, own in zip(names, specs, strict=True):
        if p[name.upper()].grad is not None and p[name.upper()].grad.any():
            check_gradient(d, name, g, own)
    check_differentiated(d, "c")


def call_of(found: Case, names: Sequence[str], mesh: str, options: str = "") -> str:
    op = f", {found.op!r}" if found.kind == "reduce" else ""
    return f"axes.{found.kind}({', '.join(names)}, {found.text!r}{op}, mesh={mesh}, sizes={found.given}{options})"


def plain_operation(d: Draw, found: Case, grid: Grid, g: str, names: Sequence[str], specs: Sequence[str]) -> None:
    """The same on plain shards, whose gradients are those of the sum of all ranks' losses."""
    p, m = d.program, mesh_of(g)
    said = places_in(found.text.split("->")[0])
    if any(not places_in(spec.partition("|")[2]) <= said for spec in specs):
        return  # something pending that the text doesn't declare
    indivisible = uneven_inside(grid, found)
    layout = drawn_layout(d)
    extreme = re.search(r"\b(max|min)@", "".join(specs))  # a pending maximum has no gradient where it is resolved
    for name, spec, shape in zip(names, specs, found.shapes, strict=True):
        make_whole(d, name.upper(), shape, torch.float64, g, layout)
        part = laid_text(f"part({name.upper()}, {g}, {spec!r}, {d.seed()})", layout)
        p.do(f"{name} = {part}{'' if extreme else '.requires_grad_()'}")
        p.do(f"{name.upper()}.requires_grad_()")
    line = call_of(found, names, m)
    if mean_stays_uneven(grid, found) or indivisible:
        d.features.add("refused")
        p.refuse(line, "a mean over uneven shards|uneven parts inside|doesn't divide into")
        return
    p.do(f"y = {line}")
    p.do(
        f"Y = whole_result({found.kind!r}, {found.text!r}, {found.op!r}, [{', '.join(n.upper() for n in names)}], {found.sizes})"
    )
    left = left_pending(found)
    if left is None:
        return
    output = spec_of_case(grid, found, found.result, found.goals, left)
    # The summands of the result are whatever they are; together they are the whole.
    p.do(f"same(resolved(y, {g}, {output!r}, {result_shape(found)}), Y)")
    kept = {name for slot in found.result for name in slot}
    alone = {slot[0] for slots in found.operands for slot in slots if len(slot) == 1} - kept
    if found.op == "mean" and alone:
        d.features.add("mean of some sizes given")
        some = {name: size for name, size in found.given.items() if name not in alone or d.chance(0.5)}
        few = line.replace(f"sizes={found.given}", f"sizes={some}")
        p.do(f"either(lambda: resolved({few}, {g}, {output!r}, {result_shape(found)}), Y, 'needs the whole size')")
    if extreme or (found.op in ("max", "min") and "|" in "".join([output, *specs])):
        return
    duals = [dual(grid, spec, found.text) for spec in (output, *specs)]
    if None in duals:
        return
    d.features.add("gradient")
    arrived, share = duals[0]
    make_whole(d, "C", result_shape(found), torch.float64, g)
    p.do(f"y.backward(part(C, {g}, {arrived!r}, {d.seed()}) / {share})")
    p.do("Y.backward(C)")
    for name, (back, parts), shape in zip(names, duals[1:], found.shapes, strict=True):
        p.do(f"same(resolved({name}.grad * {parts}, {g}, {back!r}, {shape}), {name.upper()}.grad)")
        p.do(f"owns({name}.grad)")


def left_pending(found: Case) -> Pending | None:
    """What the result of plain shards leaves pending: as the text says; what a `*` stands for, as `explain` says.

    None where a `*` stands in a text of which DTensors can't have a tensor."""
    clause = found.text.partition("->")[2].partition("|")[2]
    if "*" in clause:
        options = {"mesh": found.mesh, "op": found.op, "sizes": found.given}
        try:
            told = axes.explain(found.text, *found.shapes, **options).json()
        except axes.ShardingError as error:
            if "DTensor" in str(error):  # `explain` is of DTensors where a text doesn't say otherwise
                return None
            raise
        clause = told["tensors"][-1]["spec"].partition("|")[2]
    return tuple((op, tuple(where.strip("()").split())) for op, _, where in (w.partition("@") for w in words(clause)))


def dual(grid: Grid, spec: str, text: str) -> tuple[str, int] | None:
    """How the gradient of a plain shard lies: split as it is, summands where it is replicated.

    And the number of ranks over which it has a mean pending. None where the text is about a part of an axis.
    """
    before, _, after = spec.partition("|")
    used, said = places_in(spec), places_in(text)
    summed = []
    for axis in grid.axis_names:
        if grid.sizes[axis] == 1:
            continue
        about = [name for name in {*said, *used} if name == axis or grid.overlap(name, axis)]
        if any(grid.sizes[name] < grid.sizes[axis] for name in about):
            return None
        if about and not any(name == axis or grid.overlap(name, axis) for name in used):
            summed.append(("sum", (axis,)))
    pending = [(op, where.strip("()").split()) for op, _, where in (item.partition("@") for item in words(after))]
    means = [grid.sizes[axis] for op, names in pending if op == "mean" for axis in names]
    return before.strip() + pending_text(tuple(summed)), math.prod(means)


def places_in(text: str) -> set[str]:
    """The axes that a text names."""
    return {axis for where in re.findall(r"@(\w+|\([^)]*\))", text) for axis in where.strip("()").split()}


# ---------------------------------------------------------------------------- functions over split dims


def functions(d: Draw) -> None:
    """Softmax, losses, norms, embeddings and the largest elements over split dims are those of one device, in both views."""
    grid, g = d.grid(computed=True)
    m = mesh_of(g)
    local = d.chance(0.4)
    if local:
        d.features.add("local view")
    name = d.random.choice(tuple(FUNCTION))
    d.features.add(name)
    extents = (1, 1, 2, 3, 4, 5, 6, 7, 8, 12)
    shape = d.shape(d.random.choice((1, 2, 2, 3)), extents=extents)
    forms = [[(f"d{i}", n)] for i, n in enumerate(shape)]
    for _ in range(20):
        spec = d.spec(grid, forms)
        if refusal(grid, spec, shape) is None:
            break
    else:
        return
    d.note(grid, spec, shape)
    dims = words(spec)
    over = d.random.randrange(len(shape))
    sizes = ", ".join(f"d{i}={n}" for i, n in enumerate(shape) if i == over)
    said = f", {sizes}" if local else ""
    FUNCTION[name](d, grid, g, m, shape, spec, dims, over, said, local)


def put(d: Draw, name: str, grid: Grid, g: str, spec: str, local: bool, leaf_: bool = True) -> None:
    """A drawn whole tensor as a DTensor or as this rank's shard, a leaf."""
    p = d.program
    if local:
        p.do(f"{name} = part({name.upper()}, {g}, {spec!r})" + (".requires_grad_()" if leaf_ else ""))
        p.do(f"{name.upper()}.requires_grad_()" if leaf_ else "pass")
        return
    make_door(d, name, name.upper(), grid, g, spec, d.seed())
    if leaf_:
        leaf(d, name, grid, g, spec)


def compare(d: Draw, grid: Grid, g: str, spec: str, leaves: Mapping[str, str], text: str, local: bool) -> None:
    """The value and the gradients of `y` against those of `Y`."""
    p = d.program
    shape = tuple(p["Y"].shape)
    p.do(f"check(y, Y, {g}, {spec!r})")
    if local:
        duals = [dual(grid, own, text) for own in (spec, *leaves.values())]
        if None in duals:
            return
        make_whole(d, "C", shape, torch.float64, g)
        p.do(f"y.backward(part(C, {g}, {duals[0][0]!r}, {d.seed()}))")
        p.do("Y.backward(C)")
        for name, (back, _) in zip(leaves, duals[1:], strict=True):
            p.do(f"same(resolved({name}.grad, {g}, {back!r}, {tuple(p[name.upper()].shape)}), {name.upper()}.grad)")
        return
    cotangent(d, "c", "Y", grid, g, spec)
    p.both("y.backward(c)", "y", "c")
    for name, own in leaves.items():
        check_gradient(d, name, g, own)
        p.do(f"owns({name}.grad)")


def _softmax(d, grid, g, m, shape, spec, dims, over, said, local):
    p, name = d.program, d.random.choice(("softmax", "log_softmax", "logsumexp", "entropy"))
    make_whole(d, "X", shape, torch.float64, g)
    if shape[over] > 1 and d.chance(0.2) and name in ("softmax", "entropy"):
        p.do(f"X = X.index_fill({over}, torch.tensor(0), -torch.inf)")
    put(d, "x", grid, g, spec, local)
    p.do(f"y = axes.{name}(x, {spec!r}, over='d{over}', mesh={m})")
    if name == "entropy":
        p.do(f"P = X.softmax({over})")
        p.do(f"Y = -(P * torch.where(P > 0, P, 1).log()).sum({over})")
    else:
        p.do(f"Y = torch.{name}(X, {over})")
    rest = spec if "softmax" in name else " ".join(dim for i, dim in enumerate(dims) if i != over)
    compare(d, grid, g, rest, {"x": spec}, spec, local)


def _argmax(d, grid, g, m, shape, spec, dims, over, said, local):
    """Of numbers with ties, some of them infinite or NaN."""
    p = d.program
    make_whole(d, "X", shape, torch.float64, g)
    p.do(f"X = X.round(decimals={d.random.choice((0, 1))})")
    if d.chance(0.3):
        p.do(f"X = torch.where(X > 1, {d.random.choice(('torch.nan', 'torch.inf', '-torch.inf'))}, X)")
    put(d, "x", grid, g, spec, local, False)
    p.do(f"y = axes.argmax(x, {spec!r}, over='d{over}', mesh={m}{said if d.chance(0.5) else ''})")
    p.do(f"Y = X.argmax({over})")
    p.do(f"check(y, Y, {g}, {' '.join(dim for i, dim in enumerate(dims) if i != over)!r})")


def _sample(d, grid, g, m, shape, spec, dims, over, said, local):
    p, how = d.program, f"temperature={d.random.choice((0.1, 1.0, 3))}, seed={d.seed()}"
    make_whole(d, "X", shape, torch.float64, g)
    put(d, "x", grid, g, spec, local, False)
    p.do(f"y = axes.nn.sample(x, {spec!r}, over='d{over}', mesh={m}, {how}{said if d.chance(0.5) else ''})")
    p.do(f"Y = axes.nn.sample(X, {' '.join(f'd{i}' for i in range(len(shape)))!r}, over='d{over}', {how})")
    p.do(f"check(y, Y, {g}, {' '.join(dim for i, dim in enumerate(dims) if i != over)!r})")


def _topk(d, grid, g, m, shape, spec, dims, over, said, local):
    p, k = d.program, d.random.randint(1, shape[over])
    make_whole(d, "X", shape, torch.float64, g)
    p.do("X = X + torch.arange(X.numel()).view(X.shape) * 1e-6  # no two are equal")
    put(d, "x", grid, g, spec, local)
    p.do(f"y, places = axes.topk(x, {spec!r}, {k}, over='d{over}', mesh={m}{said if d.chance(0.5) else ''})")
    p.do(f"Y = X.topk({k}, {over}).values")
    result = " ".join("k" if i == over else dim for i, dim in enumerate(dims))
    p.do(f"check(places, X.topk({k}, {over}).indices, {g}, {result!r})")
    compare(d, grid, g, result, {"x": spec}, spec, local)


def _norm(d, grid, g, m, shape, spec, dims, over, said, local):
    p, name = d.program, d.random.choice(("rms_norm", "layer_norm"))
    make_whole(d, "X", shape, torch.float64, g)
    put(d, "x", grid, g, spec, local)
    leaves, given, wholes = {"x": spec}, "", ["None", "None"]
    for at, parameter in enumerate(("w", "b")):
        if d.chance(0.6) and (name == "layer_norm" or parameter == "w"):
            make_whole(d, parameter.upper(), (shape[over],), torch.float64, g)
            put(d, parameter, grid, g, dims[over], local)
            given += f", {('weight', 'bias')[at]}={parameter}"
            wholes[at] = parameter.upper()
            leaves[parameter] = dims[over]
    p.do(f"y = axes.{name}(x, {spec!r}, over='d{over}'{given}, eps=0.5, mesh={m}{said})")
    arguments = wholes[0] if name == "rms_norm" else ", ".join(wholes)
    p.do(
        f"Y = torch.nn.functional.{name}(X.movedim({over}, -1), ({shape[over]},), {arguments}, eps=0.5).movedim(-1, {over})"
    )
    compare(d, grid, g, spec, leaves, spec, local)


def _loss(d, grid, g, m, shape, spec, dims, over, said, local):
    p = d.program
    kept = [i for i in range(len(shape)) if i != over]
    result = [i for i in kept if d.chance(0.4)]
    reduction = d.random.choice(("mean", "sum"))
    make_whole(d, "X", shape, torch.float64, g)
    put(d, "x", grid, g, spec, local)
    labels = " ".join(dims[i] for i in kept)
    p.do(
        f"T = torch.randint(0, {shape[over]}, {tuple(shape[i] for i in kept)}, generator=torch.Generator().manual_seed({d.seed()} + {g}.line))"
    )
    if d.chance(0.5):
        p.do("T = torch.where(torch.rand(T.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -100, T)")
    put(d, "t", grid, g, labels, local, False)
    right = " ".join(dims[i] for i in result)
    smoothing, z_loss, options = d.random.choice((0, 0, 0.25, 1.0)), d.random.choice((0, 0, 0.5)), ""
    p.do("counted = (T != -100).double()")
    if d.chance(0.4):
        make_whole(d, "W", (shape[over],), torch.float64, g)
        p.do("W = (W.abs() + 0.5) * (torch.arange(len(W)) % 3 != 1)  # a class without weight")
        put(d, "w", grid, g, dims[over], local, False)
        p.do("counted = counted * W[T.clamp(min=0)]")
        options += ", weight=w"
    for option, value in (("label_smoothing", smoothing), ("z_loss", z_loss)):
        options += f", {option}={value}" if value else ""
    p.do(
        f"y = axes.cross_entropy(x, t, {f'{spec}, {labels} -> {right}'!r}, reduction={reduction!r}, mesh={m}{said if d.chance(0.5) else ''}{options})"
    )
    theirs = f"weight={'W' if 'weight' in options else None}, label_smoothing={smoothing}"
    p.do(
        f"Z = torch.nn.functional.cross_entropy(X.movedim({over}, -1).reshape(-1, {shape[over]}), T.reshape(-1), reduction='none', {theirs}).view(T.shape)"
    )
    p.do(f"Z = Z + {z_loss} * torch.logsumexp(X, {over}).square() * counted")
    gone = tuple(kept.index(i) for i in kept if i not in result)
    if not gone:
        p.do("Y = Z")
    else:
        p.do(f"Y = Z.sum({gone})" + (f" / counted.sum({gone})" if reduction == "mean" else ""))
    compare(d, grid, g, right, {"x": spec}, f"{spec}, {labels} -> {right}", local)


def _embedding(d, grid, g, m, shape, spec, dims, over, said, local):
    p = d.program
    rows, columns = over, [i for i in range(len(shape)) if i != over and d.chance(0.6)]
    ids = [i for i in range(len(shape)) if i not in (rows, *columns)]
    table = d.random.sample([rows, *columns], 1 + len(columns))
    make_whole(d, "X", [shape[i] for i in table], torch.float64, g)
    left, names = " ".join(dims[i] for i in table), " ".join(dims[i] for i in ids)
    put(d, "x", grid, g, left, local)
    p.do(
        f"T = torch.randint(0, {shape[rows]}, {tuple(shape[i] for i in ids)}, generator=torch.Generator().manual_seed({d.seed()} + {g}.line))"
    )
    put(d, "t", grid, g, names, local, False)
    right = " ".join(dims[i] for i in [*ids, *[i for i in table if i != rows]])
    padding = d.random.choice((None, d.random.randrange(-shape[rows], shape[rows]))) if shape[rows] else None
    p.do(f"y = axes.embedding(t, x, {f'{names}, {left} -> {right}'!r}, mesh={m}, padding_idx={padding}{said})")
    p.do(f"Y = X.movedim({table.index(rows)}, 0)[T]")
    if padding is not None:
        p.do(
            f"Y = torch.where((T == {padding % shape[rows]}).view([*T.shape, *[1] * {len(table) - 1}]), Y.detach(), Y)"
        )
    compare(d, grid, g, right, {"x": left}, f"{names}, {left} -> {right}", local)


FUNCTION: dict[str, Callable[..., None]] = {
    "softmax": _softmax,
    "norm": _norm,
    "argmax": _argmax,
    "sample": _sample,
    "topk": _topk,
    "cross_entropy": _loss,
    "embedding": _embedding,
}


# ---------------------------------------------------------------------------- regions


@dataclass(frozen=True)
class Region:
    """A function of a shard, the expression that it is in, and the same function of the whole `X`."""

    expression: str
    function: str
    whole: str
    result: str
    linear: bool = False


def region_of(d: Draw, grid: Grid, spec: str, shape: Sequence[int]) -> Region | None:
    """A region that fits a tensor of this sharding; None where what was drawn doesn't."""
    dims, pending = read(spec, tuple(shape))
    texts, random = words(without_pending(spec)), d.random
    plain = [i for i, dim in enumerate(dims) if len(dim) == 1]
    waiting = {name: op for op, names in pending for name in names}
    left = [f"d{i}" for i in range(len(dims))]
    said = pending_text(tuple((op, (name,)) for name, op in waiting.items()))
    kind = random.choice(
        (
            "tanh",
            "sum",
            "psum",
            "mean",
            "pmax",
            "max",
            "all_gather",
            "psum_scatter",
            "psum pending",
            "all_to_all",
            "ppermute",
            "same",
            "roll",
            "renamed",
        )
    )
    d.features.add(f"region {kind}")
    if kind == "psum pending":
        names = [name for name, op in waiting.items() if op == "sum"]
        if not names:
            return None
        rest = pending_text(tuple((op, (name,)) for name, op in waiting.items() if name not in names))
        line = " ".join(left)
        return Region(
            f"{line}{said} -> {line}{rest}",
            f"lambda t: axes.psum(t, {tuple(names)})",
            "X * 1",
            without_pending(spec) + rest,
            True,
        )
    if kind == "tanh":
        line = " ".join(left)
        return None if waiting else Region(f"{line} -> {line}", "torch.tanh", "torch.tanh(X)", spec)
    if kind == "same":
        free = [
            n
            for n in grid.axis_names
            if not any(n == a or grid.overlap(n, a) for dim in dims for _, _, names in dim for a in names)
        ]
        if waiting or not free:
            return None
        line = " ".join(left) + f" | same@{random.choice(free)}"
        return Region(f"{line} -> {line}", "lambda t: torch.tanh(t) * t", "torch.tanh(X) * X", spec)
    if not plain:
        return None
    k = random.choice(plain)
    ((_, size, axes_),) = dims[k]
    count = math.prod(grid.sizes[a] for a in axes_)
    left[k] = f"d{k}{place(axes_)}" if axes_ else f"d{k}@()"
    rest = [i for i in range(len(dims)) if i != k]
    over = tuple(axes_)
    line, without, bare = " ".join(left), " ".join(left[i] for i in rest), " ".join(texts[i] for i in rest)
    if kind == "renamed":  # the whole size of the new name follows from nothing: ranks tell each other
        right = " ".join([*left[:k], f"new{place(axes_)}" if axes_ else "new", *left[k + 1 :]])
        return None if waiting else Region(f"{line} -> {right}", "torch.tanh", "torch.tanh(X)", spec)
    if kind in ("sum", "mean"):
        if waiting or (kind == "mean" and (size % count or not size)):
            return None
        tail = pending_text(((kind, over),)) if over else ""
        return Region(f"{line} -> {without}{tail}", f"lambda t: t.{kind}({k})", f"X.{kind}({k})", bare + tail, True)
    if kind == "psum":
        inner = f"axes.psum(t.sum({k}), {over})" if over else f"t.sum({k})"
        return None if waiting else Region(f"{line} -> {without}", f"lambda t: {inner}", f"X.sum({k})", bare, True)
    if kind in ("max", "pmax"):
        if waiting or size % count or not size:
            return None
        if kind == "max":
            tail = pending_text((("max", over),)) if over else ""
            return Region(
                f"{line} -> {without}{tail}", f"lambda t: t.detach().amax({k})", f"X.detach().amax({k})", bare + tail
            )
        inner = f"axes.pmax(t.amax({k}), {over})" if over else f"t.amax({k})"
        return Region(f"{line} -> {without}", f"lambda t: {inner}", f"X.amax({k})", bare)
    if kind == "psum_scatter":
        names = [name for name, op in waiting.items() if op == "sum"]
        if len(names) != 1 or axes_ or len(waiting) > 1 or size % grid.sizes[names[0]]:
            return None
        right = [*left[:k], f"d{k}@{names[0]}", *left[k + 1 :]]
        made = [*texts[:k], f"d{k}@{names[0]}", *texts[k + 1 :]]
        return Region(
            f"{line}{said} -> {' '.join(right)}",
            f"lambda t: axes.psum_scatter(t, {names[0]!r}, {k})",
            "X * 1",
            " ".join(made),
            True,
        )
    if waiting or not over or size % count:
        return None
    if kind == "all_gather":
        right = " ".join([*left[:k], f"d{k}", *left[k + 1 :]])
        made = " ".join([*texts[:k], f"d{k}", *texts[k + 1 :]])
        return Region(f"{line} -> {right}", f"lambda t: axes.all_gather(t, {over}, {k})", "X * 1", made, True)
    if kind == "ppermute":
        shift = random.choice((1, -1, 2))
        return Region(
            f"{line} -> {line}",
            f"lambda t: axes.ppermute(t, {over}, shift={shift})",
            f"X.roll({shift * (size // count)}, {k})",
            spec,
            True,
        )
    if kind == "all_to_all":
        others = [j for j in plain if j != k and not dims[j][0][2] and dims[j][0][1] % count == 0]
        if not others:
            return None
        j = random.choice(others)
        left[j] = f"d{j}@()"
        right, made = list(left), list(texts)
        right[k], right[j], made[k], made[j] = f"d{k}", f"d{j}{place(axes_)}", f"d{k}", f"d{j}{place(axes_)}"
        return Region(
            f"{' '.join(left)} -> {' '.join(right)}",
            f"lambda t: axes.all_to_all(t, {over}, {j}, {k})",
            "X * 1",
            " ".join(made),
            True,
        )
    return Region(f"{line} -> {line}", "lambda t: t.flip(())", "X * 1", spec, True)


def regions(d: Draw) -> None:
    """A region is the function of the whole tensor, with its gradients."""
    p = d.program
    grid, g = d.grid(computed=True)
    shape = d.shape(most=200, extents=(1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 12))
    spec = d.accepted(grid, shape, pending=0.4 if d.chance(0.4) else 0.0, ops=("sum",))
    found = next(filter(None, (region_of(d, grid, spec, shape) for _ in range(12))), None)
    if found is None:
        return
    d.note(grid, spec, shape)
    layout = drawn_layout(d)
    make_whole(d, "A", shape, torch.float64, g, layout)
    if "pmax" in found.function:  # ties are divided twice, among the elements of a rank and among the ranks
        p.do("A = A + torch.arange(A.numel(), dtype=A.dtype).view(A.shape) / 512")
    make_door(d, "a", "A", grid, g, spec, d.seed(), layout)
    leaf(d, "a", grid, g, spec)
    second = "|" not in spec and "pmax" not in found.function and d.chance(0.3)
    before = (second or (d.chance(0.3) and "|" not in spec)) and "pmax" not in found.function
    p.both(f"x = {d.random.choice(NONLINEAR) if before else '{}'}".format(*["a"] * 3), "x", "a")
    p.do(f"y = axes.shard_map({found.function}, {found.expression!r}, mesh={mesh_of(g)})(x)")
    p.do(f"Y = {found.whole}")
    result_pending = "|" in found.result
    if result_pending:
        p.do("same(axes.unshard(y), Y)")
    else:
        p.do(f"check(y, Y, {g}, {found.result!r})")
    if not p["Y"].requires_grad:
        return
    d.features.add("gradient")
    if second:
        second_derivative(d, "y", ["a"], "a", grid, g, [spec], spec)
        return
    for number in range(d.random.choice((1, 2))):
        cotangent(d, f"c{number}", "Y", grid, g, without_pending(found.result))
        p.both(f"y.backward(c{number}, retain_graph=True)", "y", f"c{number}")
        check_gradient(d, "a", g, spec)
        p.do("owns(a.grad)")
        if d.chance(0.3):
            p.both("a.grad.mul_(2)", "a")


# ---------------------------------------------------------------------------- leaves beside each other


def leaves(d: Draw) -> None:
    """Each leaf owns its gradient: what is done to one changes no other, however it came."""
    p = d.program
    grid, g = d.grid(computed=True)
    m, shape = mesh_of(g), d.shape(most=100)
    forms = d.forms(shape, numbers=0.0)
    local = d.chance(0.4)
    for _ in range(20):
        spec = d.spec(grid, forms, indivisible=0)
        if refusal(grid, spec, shape) is None:
            break
    else:
        return
    d.note(grid, spec, shape)
    d.features |= {"two leaves", "second backward", *({"local view"} if local else ())}
    kind = d.random.choice(("rearrange", "gather", "einsum", "repeat", "region", "unshard", "reduce"))
    if local and kind in ("region", "unshard"):
        kind = "rearrange"
    d.features.add(f"leaves by {kind}")
    dims = words(spec)
    sizes = {n: s for form in forms for n, s in form if s}
    right, expression = spec, f"{spec} -> {spec}"
    if kind == "gather":
        right = " ".join(
            f"({' '.join(str(n) for n, _ in form)})" if len(form) > 1 else str(form[0][0]) for form in forms
        )
        expression = f"{spec} -> {right}"
    if local and re.search(r"\)@", expression):
        return  # a group that is split as a whole has to divide there
    call = {
        "rearrange": f"axes.rearrange(%s, {expression!r}, mesh={m}, sizes={sizes})",
        "gather": f"axes.rearrange(%s, {expression!r}, mesh={m}, sizes={sizes})",
        "einsum": f"axes.einsum(%s, {expression!r}, mesh={m}, sizes={sizes})",
        "repeat": f"axes.repeat(%s, {expression!r}, mesh={m}, sizes={sizes})",
        "reduce": f"axes.reduce(%s, {expression!r}, 'sum', mesh={m}, sizes={sizes})",
        "unshard": "axes.unshard(%s)",
        "region": f"axes.shard_map(lambda t: t, {(' '.join(f'd{i}' for i in range(len(dims))) + ' -> ' + ' '.join(f'd{i}' for i in range(len(dims))))!r}, mesh={m})(%s)",
    }[kind]
    for name in ("a", "b"):
        make_whole(d, name.upper(), shape, torch.float64, g)
        put(d, name, grid, g, spec, local)
    p.do(f"y = {call % 'a'} + {call % 'b'}")
    p.do("Y = A + B")
    back = dual(grid, spec, expression) if local else None
    arrived = dual(grid, right, expression) if local else None
    if local and (back is None or arrived is None):
        return
    for number in range(2):
        if local:
            make_whole(d, f"C{number}", shape, torch.float64, g)
            p.do(f"y.backward(part(C{number}, {g}, {arrived[0]!r}, {d.seed()}), retain_graph=True)")
            p.do(f"Y.backward(C{number}, retain_graph=True)")
        elif kind == "unshard":
            make_whole(d, f"C{number}", shape, torch.float64, g)
            p.do(f"y.backward(C{number}, retain_graph=True)")
            p.do(f"Y.backward(C{number}, retain_graph=True)")
        else:
            cotangent(d, f"c{number}", "Y", grid, g, right)
            p.both(f"y.backward(c{number}, retain_graph=True)", "y", f"c{number}")
        for name in ("a", "b"):
            if local:
                p.do(f"same(resolved({name}.grad, {g}, {back[0]!r}, {shape}), {name.upper()}.grad)")
            else:
                check_gradient(d, name, g, spec)
            p.do(f"owns({name}.grad)")
        p.both(f"{'ab'[number]}.grad.mul_(3)", "ab"[number])


# ---------------------------------------------------------------------------- graphs


def compiled(d: Draw) -> None:
    """A compiled function is the eager one, at sizes that change between its calls, even and uneven."""
    p = d.program
    grid, g = d.grid(sub=False)
    m = mesh_of(g)
    local = d.chance(0.25)
    d.features |= {"compiled", *({"local view"} if local else ())}
    ndim = d.random.choice((1, 2, 2, 3))
    rest = d.random.sample((2, 3, 4, 6), ndim - 1)  # torch can't trace strides that are squares
    total = len(grid.ranks)
    first = [
        d.random.choice((total, 2 * total, total * 2 - 1, total + 1, 4 * total, 2 * total + 1, 1)) for _ in range(3)
    ]
    shapes = [(n, *rest) for n in first]
    forms = [[(f"d{i}", n)] for i, n in enumerate(shapes[0])]

    def drawn(**how: Any) -> str:
        for _ in range(30):
            found = d.spec(grid, forms, replicated=0.1, **how)
            if all(refusal(grid, found, shape) is None for shape in shapes):
                return found
        return " ".join(f"d{i}" for i in range(ndim))

    source, target = (
        drawn(pending=0.5 if d.chance(0.4) else 0.0, ops=("sum", "mean", "max") if d.chance(0.3) else ("sum",)),
        drawn(),
    )
    for shape in shapes:
        d.note(grid, source, shape)
        d.note(grid, target, shape)
    extreme = "max@" in source
    expression = f"{explicit(source)} -> {explicit(target)}"
    kind = d.random.choice(("rearrange", "reduce", "region"))
    dynamic = d.random.choice((None, None, True, False))
    d.features.add(f"dynamic {dynamic}")
    if kind == "reduce" and "|" not in source and not local:
        # The last dim is summed away.
        left, right = words(explicit(source)), words(explicit(target))
        body = f"axes.reduce(x, {' '.join(left) + ' -> ' + ' '.join(right[:-1])!r}, 'sum', mesh={m})"
        whole_body, target = "X.sum(-1)", " ".join(words(target)[:-1])
    elif kind == "region" and "|" not in source and not local:
        line = " ".join(f"d{i}" for i in range(ndim))
        body = f"axes.rearrange(axes.shard_map(torch.tanh, {f'{line} -> {line}'!r}, mesh={m})(x), {expression!r}, mesh={m})"
        whole_body = "torch.tanh(X)"
    else:
        body, whole_body = f"axes.rearrange(x, {expression!r}, mesh={m}" + (", sizes=sizes)" if local else ")"), "X * 1"
    names = "x, sizes" if local else "x"
    p.do("torch._dynamo.reset()")
    p.do(
        f"f = torch.compile(lambda {names}: {body} * 2, backend='aot_eager_decomp_partition', fullgraph=True, dynamic={dynamic})"
    )
    for number, shape in enumerate(shapes):
        p.do(f"X = whole({shape}, {number} + {g}.line)")
        seed = d.seed()
        if local:
            p.do(f"x = part(X, {g}, {source!r}, {seed})")
            p.do(f"y = f(x, { {f'd{i}': n for i, n in enumerate(shape)} })")
        else:
            make_door(d, "x", "X", grid, g, source, seed)
            if not extreme:
                p.do("x.requires_grad_(); X.requires_grad_()")
            p.do("y = f(x)")
        p.do(f"Y = {whole_body} * 2")
        p.do(f"check(y, Y, {g}, {target!r})")
        if not local and not extreme:
            make_whole(d, "C", p["Y"].shape, torch.float64, g)
            p.do(f"c = axes.shard(C, {target!r}, mesh={m})")
            p.do("y.backward(c); Y.backward(C)")
            p.do("same(whole_of(x.grad), X.grad, 'the gradient')")


def explicit(spec: str) -> str:
    """The spec with a place for each dim."""
    before, bar, after = spec.partition("|")
    return " ".join(word if "@" in word else f"{word}@()" for word in words(before)) + (f" |{after}" if bar else "")


def after_torch(d: Draw) -> None:
    """What torch's reductions leave pending is resolved as they mean it, or refused with what to write instead."""
    p = d.program
    grid, g = d.grid(computed=True)
    kind = d.random.choice(("vector_norm", "vector_norm", "embedding", "embedding", "sum", "amax", "amin"))
    if kind == "embedding":
        # torch's own takes a vocabulary that is split over one axis, and no empty part of it.
        axis = d.random.choice(grid.axis_names)
        shape = (grid.sizes[axis] * d.random.choice((1, 2, 3)), d.random.choice((1, 2, 3, 4, 6)))
        spec = f"d0@{axis} d1"
    else:
        shape = d.shape(d.random.choice((1, 2, 2, 3)), extents=(1, 2, 3, 4, 5, 6, 8, 12))
        if kind in ("amax", "amin"):
            # torch's own refuses an empty shard, on the rank alone that has it.
            shape = tuple(min(extent, 4) * len(grid.ranks) for extent in shape)
        spec = d.accepted(grid, shape)
    if any("factor" in feature or feature == "order of axes" for feature in features_of(grid, spec, shape)):
        return  # torch's own reductions of strided shards are torch's
    d.note(grid, spec, shape)
    make_whole(d, "X", shape, torch.float64, g)
    make_door(d, "x", "X", grid, g, spec, d.seed())
    d.features.add(f"{kind} of torch")
    if kind == "embedding":
        p.do(f"T = torch.randint(0, {shape[0]}, (5,), generator=torch.Generator().manual_seed({d.seed()} + {g}.line))")
        p.do(f"t = axes.shard(T, 'i', mesh={mesh_of(g)})")
        p.do("y = torch.nn.functional.embedding(t, x)")
        p.do("Y = torch.nn.functional.embedding(T, X)")
    else:
        order = d.random.choice(("", ", 1", ", 3")) if kind == "vector_norm" else ""
        dim = f", dim={d.random.randrange(len(shape))}" if d.chance(0.5) else ""
        function = "torch.linalg.vector_norm" if kind == "vector_norm" else f"torch.{kind}"
        p.both(f"y = {function}(x{order}{dim})", "y", "x")
    where = f"{mesh_of(g)}.sharding({' '.join(['_'] * p['Y'].ndim)!r})"
    p.do("either(lambda: axes.unshard(y), Y, 'only torch knows')")
    p.do(f"either(lambda: axes.reshard(y, {where}).to_local(), Y, 'only torch knows')")
    if d.chance(0.5) and p["Y"].ndim:
        names = " ".join(f"d{i}" for i in range(p["Y"].ndim))
        p.do(f"either(lambda: axes.unshard(axes.rearrange(y, {f'{names} -> {names}'!r})), Y, 'only torch knows')")
    p.do("same(y.full_tensor(), Y)")


def autocast(d: Draw) -> None:
    """An einsum under `torch.autocast`, with its gradients."""
    p = d.program
    grid, g = d.grid(computed=True)
    found = flow_case(d.random, kind="einsum", mesh=grid.mesh)
    if any(s.pending for s in found.shardings) or 0 in found.sizes.values() or math.prod(found.sizes.values()) > 400:
        return
    names = [*"uvw"[: len(found.operands)]]
    specs = [spec_of_case(grid, found, slots, found.places) for slots in found.operands]
    result = spec_of_case(grid, found, found.result, found.goals)
    if refusal_of_case(grid, found, result) or any(
        refusal(grid, s, n) for s, n in zip(specs, found.shapes, strict=True)
    ):
        return
    d.features.add("autocast")
    for name, spec, shape in zip(names, specs, found.shapes, strict=True):
        make_whole(d, name.upper(), shape, torch.float32, g)
        make_door(d, name, name.upper(), grid, g, spec, d.seed())
        p.both(f"{name}.requires_grad_()", name)
    line = call_of(found, names, mesh_of(g))
    p.do(f"with torch.autocast('cpu', dtype=torch.bfloat16): y = {line}")
    p.do(
        f"with torch.autocast('cpu', dtype=torch.bfloat16): Y = whole_result('einsum', {found.text!r}, 'sum', [{', '.join(n.upper() for n in names)}], {found.sizes})"
    )
    p.do("assert torch.allclose(axes.unshard(y).float(), Y.float(), rtol=0.04, atol=0.5), (y, Y)")
    p.do("axes.unshard(y).float().sum().backward(); Y.float().sum().backward()")
    for name in names:
        p.do(
            f"assert torch.allclose(axes.unshard({name}.grad).float(), {name.upper()}.grad.float(), rtol=0.04, atol=0.5), ({name}.grad, {name.upper()}.grad)"
        )


def inplace_of_shards(d: Draw, grid: Grid, g: str, shape: Sequence[int]) -> None:
    """The same of plain shards: a result is a view that autograd knows, or shares nothing."""
    p, m, shape = d.program, mesh_of(g), tuple(shape)
    forms = d.forms(shape, numbers=0.0)
    spec, target = (d.spec(grid, forms, indivisible=0) for _ in range(2))
    sizes = {n: s for form in forms for n, s in form if s}
    make_whole(d, "X", shape, torch.float64, g)
    p.do(f"x = part(X, {g}, {spec!r})")
    if d.chance(0.5):
        p.do("w = x.requires_grad_(); x = w * w")
    p.do("u = torch.ones_like(x, requires_grad=True); s = x * u")
    kind = d.random.choice(("reshard", "rearrange", "einsum", "repeat"))
    if kind in ("repeat", "einsum") and re.search(r"\)@", f"{spec} {target}"):
        kind = "reshard"
    line = f"y = axes.{kind}(x, {f'{spec} -> {target}'!r}, mesh={m}, sizes={sizes})"
    if cuts_between_names(grid, spec, target, forms):
        p.refuse(line, "don't fall on its names")
        return
    p.do(line)
    p.do("keep = x.detach().clone()")
    change = d.random.choice(("y.mul_(2)", "y.add_(1)", "y.zero_()", "y[...] = 7"))
    p.do(f"def write(y): {change}")
    p.do("refused = fails(lambda: write(y))")
    p.do("assert not refused or is_tied(y, x), 'a result of its own may be written'")
    p.do("seen = refused or fails(lambda: s.sum().backward())")
    p.do("if not seen: same(u.grad, keep)")


# ---------------------------------------------------------------------------- doors


def doors(d: Draw) -> None:
    """Gradients across the doors between plain tensors and DTensors, by what ranks do with their copies."""
    p = d.program
    grid, g = d.grid(computed=True)
    m, shape = mesh_of(g), d.shape(most=200)
    kind = d.random.choice(("shard", "unshard", "from_local", "from_local", "to_local", "to_local"))
    d.features |= {"gradient", f"door {kind}"}
    spec = d.accepted(
        grid, shape, pending=0.3 if kind in ("from_local", "to_local") and d.chance(0.3) else 0.0, ops=("sum", "mean")
    )
    d.note(grid, spec, shape)
    plain = without_pending(spec)
    layout = drawn_layout(d)
    make_whole(d, "A", shape, torch.float64, g, layout)
    if kind == "shard":
        p.do("a = A.clone().requires_grad_(); A.requires_grad_()")
        p.both("h = a * a", "h", "a")
        p.do(f"x = axes.shard(h, {spec!r}, mesh={m}); X = H")
        cotangent(d, "c", "X", grid, g, spec)
        p.both("x.backward(c)", "x", "c")
        p.do("same(a.grad, A.grad, 'the gradient')")
        return
    if kind == "unshard":
        make_door(d, "a", "A", grid, g, spec, d.seed(), layout)
        leaf(d, "a", grid, g, spec)
        p.both("h = a * a", "h", "a")
        make_whole(d, "C", shape, torch.float64, g)
        p.do("axes.unshard(h).backward(C); H.backward(C)")
        check_gradient(d, "a", g, spec)
        return
    unused = [
        n
        for n in grid.axis_names
        if grid.sizes[n] > 1 and not any(n == u or grid.overlap(n, u) for u in places_in(spec))
    ]
    if any(
        grid.overlap(u, n) and grid.sizes[u] < grid.sizes[n] for u in places_in(spec) for n in grid.axis_names if u != n
    ):
        return  # a part of an axis: what is replicated over the rest has no name here
    same_ = [n for n in unused if d.chance(0.3)] if d.chance(0.4) else []
    left = [n for n in unused if n not in same_]
    how = d.random.choice(("whole", "summed", None))
    said = spec + (" " if "|" in spec else " | " if same_ else "") + " ".join(f"same@{n}" for n in same_)
    given = "" if how is None else f", grad={how!r}"
    summed = pending_text(tuple(("sum", (n,)) for n in (left if how == "summed" else ())))
    means = math.prod(grid.sizes[n] for op, names in read(spec, shape)[1] if op == "mean" for n in names)
    if kind == "from_local":
        p.do(f"a = {laid_text(f'part(A, {g}, {spec!r}, {d.seed()})', layout)}.requires_grad_(); A.requires_grad_()")
        line = f"axes.from_local(a, {said!r}, mesh={m}, shape={shape}{given})"
        if how is None and left:
            d.features.add("refused")
            p.refuse(line, "grad=")
            return
        p.do(f"x = {line}; X = A")
        before = d.chance(0.5) and "|" not in spec
        if before:
            p.both("x = x * x", "x")
        cotangent(d, "c", "X", grid, g, plain)
        p.both("x.backward(c)", "x", "c")
        p.do(f"same(resolved(a.grad * {means}, {g}, {plain + summed!r}, {shape}), A.grad)")
        return
    make_door(d, "a", "A", grid, g, spec, d.seed(), layout)
    leaf(d, "a", grid, g, spec)
    if "|" not in spec:
        p.both("h = a * a", "h", "a")
    else:
        p.do("h, H = a, A")
    line = f"axes.to_local(h{f', {said!r}' if same_ else ''}{given})"
    if how is None and left:
        d.features.add("refused")
        p.refuse(f"with {m}: {line}" if same_ else line, "grad=")
        return
    p.do(f"with {m}: t = {line}")
    make_whole(d, "C", shape, torch.float64, g)
    p.do(f"t.backward(part(C, {g}, {plain + summed!r}, {d.seed()}) / {means}); H.backward(C)")
    check_gradient(d, "a", g, spec)


# ---------------------------------------------------------------------------- sizes that ranks tell each other


def told(d: Draw) -> None:
    """Parts of any sizes are one tensor where they are the shards of one; else they are one error on every rank."""
    p = d.program
    grid, g = d.grid(elsewhere=0.1)
    m, names = mesh_of(g), d.family(grid)
    count = math.prod(grid.sizes[name] for name in names)
    if count == 1:
        return
    shape = (d.random.choice((0, 1, 3, 5, 7, 10)), 2)
    spec = f"new{place(names)} d"
    if PART_OF_AN_AXIS in (refusal(grid, spec, shape) or ""):
        return
    shares = [len(grid.pieces(spec, shape, position)[0]) for position in range(len(grid.ranks))]
    at = [int(coordinate) for coordinate in grid.joint(names)]
    rows = [shares[at.index(coordinate)] for coordinate in range(count)]
    right = list(rows)
    if d.chance(0.5):
        cuts = sorted(d.random.randrange(shape[0] + 1) for _ in range(count - 1))
        rows = [stop - start for start, stop in zip([0, *cuts], [*cuts, shape[0]], strict=True)]
    make_whole(d, "W", shape, torch.float64, g)
    door = d.random.choice(("from_local", "region", "dropout"))
    d.features |= {f"told {door}", "unequal parts" if rows != right else "parts"}
    here = None if grid.here is None else at[grid.here]
    part_ = "W[:0]" if here is None else f"W[{sum(rows[:here])}:{sum(rows[:here]) + rows[here]}]"
    p.do(f"a = {part_}.clone()")
    line = {
        "from_local": f"axes.from_local(a, {spec!r}, mesh={m})",
        "region": f"axes.shard_map(lambda t: a, 'one -> {spec}', mesh={m})(axes.ones('one', mesh={m}, one=1))",
        "dropout": f"axes.nn.dropout(a, 0.5, {spec!r}, mesh={m}, seed=3)",
    }[door]
    reason = "isn't one of the ranks of" if here is None else "don't have the shards of one tensor"
    reason = reason if here is None or rows != right else refusal(grid, spec, shape) if door != "dropout" else None
    if reason is not None:
        p.refuse(line, reason)
    elif door == "dropout":
        p.do(f"same({line}, axes.nn.dropout(W, 0.5, 'new d', seed=3)[{sum(rows[:here])}:][: {rows[here]}])")
    else:
        p.do(f"x = {line}")
        p.do(f"check(x, W, {g}, {spec!r})")


LAWS: dict[str, Law | str] = {
    "whole": whole,
    "chain": chain,
    "shards": shards,
    "gradients": gradients,
    "leaves": leaves,
    "inplace": inplace,
    "operations": operations,
    "functions": functions,
    "regions": regions,
    "compiled": compiled,
    "autocast": autocast,
    "after_torch": after_torch,
    "doors": doors,
    "told": told,
    "training": "tests.law_training",
    "files": "tests.law_files",
    "named": "tests.law_named",
    "sizes": "tests.law_calls",
    "many": "tests.law_calls",
    "dropout": "tests.law_calls",
    "transfers": "tests.law_transfers",
}
"""By name; those of other modules are the names of their modules, `tests.law_x` with a function `x`."""


def law_of(name: str) -> Law:
    found = LAWS[name]
    if isinstance(found, str):
        law: Law = getattr(importlib.import_module(found), name)
        return law
    return found


# ---------------------------------------------------------------------------- working through cases


class Failed(AssertionError):
    """A case that failed on this rank, with its program."""


def seeded(law: str, ranks: int, island: int, index: int) -> Draw:
    seed = os.environ.get("AXES_SEED", "")
    return Draw(f"{law} {ranks} {island} {index}{seed and f' {seed}'}", ranks)


def run_case(law: str, ranks: int, island: int, index: int) -> Draw:
    """One case on this rank's island. A failure has the case as its note."""
    d = seeded(law, ranks, island, index)
    try:
        law_of(law)(d)
    except TorchRefuses:
        d.features.add("refused by torch")
    except BaseException as error:
        where = f"rank {dist.get_rank() - island * ranks} of {ranks}"
        error.add_note(f"law '{law}', case {index}, {where}. This program repeats it:\n\n{d.program.script(ranks)}")
        error.program = d.program  # type: ignore[attr-defined]
        raise
    return d


def island_of(ranks: int) -> int | None:
    """Which island of so many ranks this rank is on, None for the ranks that are left over."""
    number = dist.get_rank() // ranks
    return number if (number + 1) * ranks <= dist.get_world_size() else None


def work(law: str, ranks: int, count: int) -> list[set[str]]:
    """Works through `count` cases on this rank's island; the features of each, from the island's first rank."""
    island = island_of(ranks)
    if island is None:
        return []
    torch.set_num_threads(1)
    watch()
    on_island(island * ranks)
    found: list[set[str]] = []
    index = 0
    while len(found) < count:
        d = run_case(law, ranks, island, index)
        if d.judged:
            found.append(d.features)
        index += 1
    return found if dist.get_rank() == island * ranks else []


# ---------------------------------------------------------------------------- looking for failures


def explore(
    law: str, first: int, count: int, seconds: float, first_failure: bool = False
) -> tuple[list[dict[str, object]], int, int]:
    """Goes through cases whether they fail or not: `(failures, next case, how many)`. A hang ends it.

    With `first_failure` so does a failure.
    """
    import time
    import traceback

    torch.set_num_threads(1)
    watch()
    on_island(0)
    ranks, failures, done = dist.get_world_size(), [], 0
    status = dist.new_group(timeout=timedelta(seconds=60))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    watch()
    start = time.monotonic()
    for index in range(first, first + count):
        began, found = time.monotonic(), None
        try:
            run_case(law, ranks, 0, index)
        except Exception as error:
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if "/axes/" in f.filename or "torch" in f.filename
            ]
            where = f"{frames[-1].filename.split('/')[-1]}:{frames[-1].name}" if frames else "a check"
            message = f"{type(error).__name__}: {error}"
            program = str(getattr(error, "program", ""))
            line = re.sub(r"\w*\d+", "", program.splitlines()[-1].strip().split("(")[0]) if program else ""
            line += "".join(f" after {way}" for way in re.findall(r"^y = axes.(\w+)", program, re.M))
            kind = re.sub(r"'[^']*'|\[[^]]*\]|\(.*\)|wrong numbers.*", "..", message.splitlines()[0])
            kind = re.sub(r"\d+(\.\d+)?", "N", kind)[:110]
            found = {
                "kind": f"{kind} @ {where} in {line}",
                "message": message[:400],
                "program": program,
                "index": index,
            }
        everyone: list[dict[str, object] | None] = [None] * ranks
        dist.all_gather_object(everyone, found, group=status)
        done += 1
        bad = [each for each in everyone if each is not None]
        if bad:
            first_bad = min(
                bad,
                key=lambda each: (
                    "imed out" in str(each["message"]) or "onnection" in str(each["message"]),
                    len(str(each["program"])),
                ),
            )
            failures.append({**first_bad, "ranks": f"{len(bad)} of {ranks}"})
            if (
                first_failure
                or any(("imed out" in str(each["message"]) or "onnection" in str(each["message"])) for each in bad)
                or time.monotonic() - began > 4
            ):
                return failures, index + 1, done
        late = [time.monotonic() - start > seconds]
        dist.broadcast_object_list(late, 0, group=status)
        if late[0]:
            return failures, index + 1, done
    return failures, first + count, done


def main() -> None:
    import argparse
    import time

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--law", nargs="*", default=list(LAWS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--show", type=int, default=40)
    parser.add_argument("--first-failure", action="store_true", help="end with the first case that fails")
    options = parser.parse_args()
    os.environ["AXES_LAWS_TIMEOUT"] = "6"
    failed = False
    for law in options.law:
        kinds: dict[str, dict[str, object]] = {}
        counts: Counter[str] = Counter()
        for ranks in options.ranks:
            at, end, total, began = options.first, options.first + options.cases, 0, time.monotonic()
            while at < end:
                try:
                    given = law, at, end - at, 100.0, options.first_failure
                    failures, next_, done = axes.launch(explore, ranks, *given, timeout=200)[0]
                except Exception as error:
                    failures, next_, done = (
                        [
                            {
                                "kind": f"the world ended: {str(error)[:300]}",
                                "message": "",
                                "program": f"after case {at}",
                                "index": f"{at} or later",
                            }
                        ],
                        at + 50,
                        0,
                    )
                total, at = total + done, end if options.first_failure and failures else next_
                for failure in failures:
                    kind = f"{law}: {failure['kind']}"
                    counts[kind] += 1
                    known = kinds.get(kind)
                    if known is None or len(str(failure["program"])) < len(str(known["program"])):
                        kinds[kind] = {**failure, "on": ranks}
            spent = time.monotonic() - began
            print(f"# {law} on {ranks}: {total} cases, {1000 * spent / max(total, 1):.0f} ms each", flush=True)
        failed = failed or bool(counts)
        for kind, count in counts.most_common(options.show):
            found = kinds[kind]
            title = f"{count} times, {found['on']} ranks, case {found.get('index')}, {found.get('ranks')}: {kind}"
            print(f"\n## {title}\n{found['message']}\n```python\n{found['program']}\n```", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
